"""The cost to resume a sequence by recompute or by swap, from measured rates."""

from __future__ import annotations

from dataclasses import dataclass

KEEP = 0.75
"""Weight of the old value in a moving average: four measurements outweigh the past."""


@dataclass(slots=True)
class Rates:
    """Moving averages of measured costs. In seconds and bytes.

    token_s:        to compute a token of a prompt
    token_sq_s:     more for each token that it attends to
    pass_s:         to compress a sequence once
    out_s, in_s:    to move a byte from the device to the host, and back
    disk_in_s:      to read a byte from disk
    call_s:         of a move, however small
    """

    token_s: float = 1e-4
    token_sq_s: float = 0.0
    pass_s: float = 0.0
    out_s: float = 1e-10
    in_s: float = 1e-10
    disk_in_s: float = 1e-9
    call_s: float = 1e-5

    def note(self, name: str, seconds: float, amount: float) -> None:
        """Record a measurement."""
        if amount > 0 and seconds > 0:
            setattr(self, name, KEEP * getattr(self, name) + (1 - KEEP) * seconds / amount)

    def recompute_s(self, num_tokens: int, num_found: int, num_passes: int) -> float:
        """Seconds to recompute num_tokens after num_found cached ones."""
        squares = (num_tokens**2 - num_found**2) / 2
        return (num_tokens - num_found) * self.token_s + squares * self.token_sq_s + num_passes * self.pass_s

    def load_s(self, num_bytes: int) -> float:
        """Seconds to read from disk to the device."""
        return num_bytes * (self.disk_in_s + self.in_s) + self.call_s

    def swap_s(self, bytes_out: int, bytes_in: int) -> float:
        """Seconds to move out and back."""
        return bytes_out * self.out_s + bytes_in * self.in_s + 2 * self.call_s
