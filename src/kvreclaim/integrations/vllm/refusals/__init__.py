"""Features that do not work with the plugin, with reasons, and the check of vLLM's names."""
