"""Several models behind one address, each a `kvreclaim serve` of its own while it is in use."""
