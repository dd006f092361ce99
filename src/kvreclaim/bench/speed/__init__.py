"""How long steps of this machine's engine take, and requests that come when they come."""
