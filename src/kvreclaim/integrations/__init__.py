"""kvreclaim inside of other engines."""
