"""All code for the private API of vLLM 0.32, one file per side. Later versions use it where that API has not
changed (settings/family.py)."""
