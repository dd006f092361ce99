"""The sizes of tables of cells where they are reserved before the pool is sized: on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.compression.cell_pass import MAX_BYTES
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.worker.cells.heads import MAX_ENTRIES
from kvreclaim.memory.blocks import blocks_for

WIDEST = 8
"""Most tokens that a pass leaves one head, in budgets. Most heads keep less than one, a few several."""
MOST_SHARE = 0.25
"""Most of the memory of the pool that tables of cells may take."""


@dataclass(frozen=True, slots=True)
class TableLimits:
    """tokens: of a head in a step over cells; after_pass: tokens that a pass leaves a head; None: no limit.

    A longer request that is not compressed reads vLLM's own table.
    """

    tokens: int
    after_pass: int | None

    @classmethod
    def of(cls, *, budget: int, most_tokens: int | None, max_model_len: int) -> TableLimits:
        """Return the limits of an engine.

        budget:      in whole blocks
        most_tokens: of a compressed request; None: its whole length
        """
        if most_tokens is None:
            return cls(max_model_len, None)
        after_pass = WIDEST * budget
        return cls(min(max_model_len, after_pass + most_tokens - budget), after_pass)


def table_bytes(
    *, num_layers: int, num_kv_heads: int, num_tokens: int, block_size: int, num_rows: int
) -> int:
    """Return the bytes of the tables of unequal heads on one worker: of a step and of the requests, a pass's
    move, and temporary memory to make them.

    num_tokens: most of a head; num_rows: requests at once
    """
    entries = num_layers * num_kv_heads * num_rows * blocks_for(num_tokens, block_size)
    return 2 * 4 * entries + 24 * MAX_ENTRIES + 4 * MAX_BYTES


def refuse_wide_tables(taken: int, available: int) -> None:
    """Raises: InvalidArgumentError if tables of cells take too much of the memory of the pool."""
    if taken > MOST_SHARE * available:
        raise InvalidArgumentError(
            f"kv_compression: the block tables of unequal heads take {taken / 2**30:.1f} GiB of the "
            f"{available / 2**30:.1f} GiB for the cache, at most {MOST_SHARE:.0%} is allowed; lower "
            "--max-num-seqs, the budget or --max-num-batched-tokens, or take a policy with equal heads."
        )
