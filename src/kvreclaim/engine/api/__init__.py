"""What Python callers see: LLM, chat, exports."""
