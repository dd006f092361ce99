"""The tasks in plain English, for any chat model and tokenizer, scored from generated text."""
