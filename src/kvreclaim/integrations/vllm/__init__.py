"""Block-freeing compression inside vLLM, which finds plugin.py by its entry point."""
