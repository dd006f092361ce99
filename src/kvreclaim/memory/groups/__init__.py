"""Group managers: the blocks that sequences hold in layers of one kind, all over one pool."""
