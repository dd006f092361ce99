"""Options of operators and of requests; groups of layers, versions of vLLM."""
