"""The engine: validate, schedule, execute, process outputs."""
