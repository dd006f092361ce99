"""Streaming parsers that split a model's text into text, reasoning and tool calls."""
