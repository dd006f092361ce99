"""A compressed cache drafts and the full one verifies: memory traffic of the one, answers of the other."""
