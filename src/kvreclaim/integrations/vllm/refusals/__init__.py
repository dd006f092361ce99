"""What does not work with the plugin, each with its reason, and the check of vLLM's names."""
