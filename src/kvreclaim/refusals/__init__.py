"""What does not go together: rows of the compatibility table."""
