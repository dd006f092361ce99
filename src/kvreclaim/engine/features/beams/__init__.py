"""Outputs are searched for by beams."""
