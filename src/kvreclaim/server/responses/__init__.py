"""OpenAI's Responses API, over what chat has."""
