"""What a model's text consists of, found while it streams: text, reasoning and tool calls."""
