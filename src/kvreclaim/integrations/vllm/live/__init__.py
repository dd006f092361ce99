"""The plugin's live view for operators: the page of the block pool, and a line in the log."""
