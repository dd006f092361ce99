"""Slots of one sequence: due points, lengths, slots needed, where survivors go. Integers only."""
