"""What policies ask for besides keys and values."""
