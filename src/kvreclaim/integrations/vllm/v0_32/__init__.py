"""Everything that touches the private API of vLLM 0.32, one file per side."""
