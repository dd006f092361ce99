"""What an operator configures, and what of it a request may change; groups of layers, versions of vLLM."""
