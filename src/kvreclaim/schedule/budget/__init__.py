"""Slots of one sequence: due points, lengths, slots needed, positions of survivors. Integers only."""
