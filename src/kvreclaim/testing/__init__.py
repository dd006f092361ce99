"""For whoever writes a policy: the contract that every policy must keep, as a function."""

from kvreclaim.testing.contract import CHECKS, check_policy

__all__ = ["CHECKS", "check_policy"]
