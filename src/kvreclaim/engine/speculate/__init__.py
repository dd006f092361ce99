"""Tokens are guessed, and the model says in one forward pass which of them it would have drawn."""
