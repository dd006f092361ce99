"""How requests begin, fork and end."""
