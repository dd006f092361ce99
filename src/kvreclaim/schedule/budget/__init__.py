"""What one sequence may hold: due points, lengths, slots, where survivors go. Integers only."""
