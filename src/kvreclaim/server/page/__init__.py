"""A page that shows the block pool while it serves: static files, and a feed of server-sent events."""
