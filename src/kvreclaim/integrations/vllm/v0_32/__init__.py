"""Everything that touches the private API of vLLM 0.32, one file per side; also of later versions, where
nothing that it touches has changed (settings/family.py)."""
