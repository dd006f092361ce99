"""The engine for callers in an event loop: in a thread of theirs, or in a process of its own."""
