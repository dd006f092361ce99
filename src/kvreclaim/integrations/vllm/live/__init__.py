"""What an operator sees of the plugin while it runs: the page of the block pool, and a line in the log."""
