"""Step times of this machine's engine, and requests at given arrival times."""
