"""Group managers: who holds which blocks in the layers of one kind, all over one pool."""
