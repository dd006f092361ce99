"""A page that shows the block pool of a running server: static files, and a feed of server-sent events."""
