"""The Python API: LLM, chat, exports."""
