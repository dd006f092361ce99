"""What vLLM loads by name: the plugin, the scheduler, the workers, and calibration in its own process."""
