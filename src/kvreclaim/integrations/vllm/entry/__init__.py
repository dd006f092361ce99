"""Modules that vLLM loads by name: plugin, scheduler, workers, and calibration in its own process."""
