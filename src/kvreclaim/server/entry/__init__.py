"""The app and its start."""
