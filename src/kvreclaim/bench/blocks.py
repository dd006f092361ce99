"""What block bookkeeping costs, and that the cost does not depend on the size of the pool."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from itertools import count
from statistics import median

from rich.table import Table

from kvreclaim.bench.common import Row, seconds, sheet
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory import MemoryManager

BLOCK_SIZE = 16
PROMPT_BLOCKS = 256
DECODED_TOKENS = 1024
OPERATIONS = {"allocate": "block", "free": "block", "prefix hit": "block", "grow": "token"}


def run(sizes: Sequence[int] = (10**3, 10**5, 10**6), *, repeats: int = 21) -> list[Row]:
    """Time the memory manager in pools of these sizes, each one full of cached prefixes.

    That is the steady state of a server: every free block still caches something, so allocating
    evicts. Each pool passes check() before it is timed. allocate: grow for a prompt of 256 blocks,
    evictions included; free: all its blocks; prefix hit: match and admit the same prompt; grow:
    can_grow, grow and commit of one token, hashing of the blocks that fill included.

    Args:
        sizes:   blocks per pool, each >= 1000
        repeats: timings per operation; the median is reported

    Returns: one row per size and operation: num_blocks, operation, unit, us_per_unit (microseconds),
        ratio (to the smallest pool of the call), block_size, repeats, python.
    """
    if not sizes or min(sizes) < 1000 or repeats < 1:
        raise InvalidArgumentError(
            f"sizes are {tuple(sizes)}, repeats {repeats}; pools have at least 1000 blocks and are timed "
            "at least once; use the defaults"
        )
    timings = {size: _time_pool(size, repeats) for size in sorted(set(sizes))}
    smallest = timings[min(sizes)]
    return [
        {
            "num_blocks": size,
            "operation": operation,
            "unit": unit,
            "us_per_unit": timing[operation],
            "ratio": timing[operation] / smallest[operation],
            "block_size": BLOCK_SIZE,
            "repeats": repeats,
            "python": platform.python_version(),
        }
        for size, timing in timings.items()
        for operation, unit in OPERATIONS.items()
    ]


def blocks_table(rows: Sequence[Row]) -> Table:
    """What run returned."""
    columns = {
        "operation": "{operation}",
        "pool (blocks)": "{num_blocks:,}",
        "µs": "{us_per_unit:.2f}",
        "per": "{unit}",
        "× smallest pool": "{ratio:.2f}",
    }
    by_operation = sorted(rows, key=lambda row: list(OPERATIONS).index(row["operation"]))
    return sheet(f"block operations, {BLOCK_SIZE} slots per block, median", columns, by_operation)


def _time_pool(num_blocks: int, repeats: int) -> dict[str, float]:
    """Median microseconds per unit of each operation."""
    memory, seq_ids = MemoryManager(num_blocks, BLOCK_SIZE), count()
    for _ in range(-(-num_blocks // PROMPT_BLOCKS)):
        _serve(memory, next(seq_ids))
    memory.check()
    samples: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
    for _ in range(repeats):
        for operation, elapsed_s, units in _time_once(memory, seq_ids):
            samples[operation].append(elapsed_s / units * 1e6)
    memory.check()
    return {operation: median(values) for operation, values in samples.items()}


def _prompt(seq_id: int) -> list[int]:
    """256 full blocks and one token that no other sequence begins with."""
    length = PROMPT_BLOCKS * BLOCK_SIZE
    return [seq_id, *range(length)]


def _serve(memory: MemoryManager, seq_id: int) -> None:
    """A prompt comes, is computed and finishes: its full blocks stay cached."""
    tokens = _prompt(seq_id)[:-1]
    memory.admit(seq_id, memory.match_prefix(memory.keys(tokens)))
    memory.grow(seq_id, len(tokens))
    memory.commit(seq_id, len(tokens))
    memory.free(seq_id)


def _time_once(memory: MemoryManager, seq_ids: Iterator[int]) -> Iterator[tuple[str, float, int]]:
    """One sample of each operation: name, seconds, units. Leaves every block free or cached."""
    seq_id = next(seq_ids)
    tokens = _prompt(seq_id)
    full = tokens[:-1]
    memory.admit(seq_id, memory.match_prefix(memory.keys(full)))
    yield "allocate", seconds(lambda: memory.grow(seq_id, len(full))), PROMPT_BLOCKS
    memory.commit(seq_id, len(full))
    yield "free", seconds(lambda: memory.free(seq_id)), PROMPT_BLOCKS

    def hit() -> None:
        memory.admit(seq_id, memory.match_prefix(memory.keys(tokens)))

    yield "prefix hit", seconds(hit), PROMPT_BLOCKS
    assert memory.table(seq_id).physical_len == len(full), "the prompt was not hit as a whole"

    def decode() -> None:
        for token in range(DECODED_TOKENS):
            assert memory.can_grow(seq_id, 1)
            memory.grow(seq_id, 1)
            tokens.append(token)
            memory.commit(seq_id, 1)

    yield "grow", seconds(decode), DECODED_TOKENS
    memory.free(seq_id)
