"""The scheduler's process: when requests are compressed, and how many tokens each keeps."""
