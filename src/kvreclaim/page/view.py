"""State and owner of each block of the pool. Integers and ids, no text of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

FREE: Final = 0
CACHED: Final = 1
PINNED: Final = 2
IN_USE: Final = 3
SHARED: Final = 4


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that holds blocks; lengths and counts are sums over its outputs that run.

    num_blocks:  entries of its block tables; a block that several outputs share counts for each
    num_evicted: tokens that each head no longer attends to
    promise:     what compression was requested to keep, for people
    """

    request_id: str
    num_sequences: int
    logical_len: int
    physical_len: int
    num_blocks: int
    num_evicted: int
    blocks_freed: int
    promise: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PoolView:
    """Copies, valid as long as the caller keeps them.

    state:    [B] uint8: FREE, CACHED (a prefix hit can find it), PINNED (and it is reused last),
              IN_USE (by one sequence), SHARED (by several)
    owner:    [B] int32 index into requests; of several holders the first in the order of requests; -1: none
    requests: those that hold blocks, in the order in which they were admitted
    """

    state: np.ndarray
    owner: np.ndarray
    requests: tuple[RequestView, ...]
