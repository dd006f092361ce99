"""Begin, fork and end requests."""
