"""OpenAI's Responses API, implemented on top of chat."""
