"""HTTP: OpenAI's and Anthropic's protocols, metrics, and a page that shows the block pool."""
