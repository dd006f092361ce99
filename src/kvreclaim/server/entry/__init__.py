"""The FastAPI app and its start."""
