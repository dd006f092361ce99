"""A step: schedule, execute, answer; how requests begin and end."""
