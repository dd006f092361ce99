"""Block-freeing compression inside vLLM. Importing this imports nothing; vLLM finds the entry point in plugin."""
