"""Blocks found again by what they hold: keys, the index of them, what prompts hit and why not."""
