"""A block pool made of lists, and requests, as the ledger of the plugin for vLLM sees them."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvreclaim.integrations.vllm.scheduler.ledger import Ledger
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.memory import CompactionPlan, Shrunk, TableState


@dataclass
class FakeRequest:
    """A request as the ledger sees it. slots: of each live slot, whether it holds a prompt token; drawn:
    output tokens before a preemption, which are computed again."""

    request_id: str
    num_prompt_tokens: int
    wanted: Any = None
    resumable: bool = False
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    spec_token_ids: list[int] = field(default_factory=list)
    slots: list[bool] = field(default_factory=list)
    drawn: int = 0

    @property
    def num_tokens(self) -> int:
        return max(self.num_prompt_tokens + self.drawn, self.num_computed_tokens)

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(extra_args=None if self.wanted is None else {"kv_compression": self.wanted})

    def grow(self, count: int) -> None:
        self.slots.extend(self.num_computed_tokens + n < self.num_prompt_tokens for n in range(count))
        self.num_computed_tokens += count


class ListPool:
    """Blocks as integers; a place given back holds None behind the others, as the real adapter leaves it."""

    num_spare = 0

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs = [0] * num_blocks
        self.indexed = [False] * num_blocks
        self.tables: dict[str, list[int | None]] = {}

    @property
    def num_free(self) -> int:
        return self.refs.count(0)

    def places(self, request_id: str) -> int:
        return len(self.tables.get(request_id, ()))

    def covering(self, num_spare: int) -> ListPool:
        """Shares all but num_spare."""
        pool = copy(self)
        pool.num_spare = num_spare
        return pool

    def held(self, request_id: str) -> list[int]:
        return [block for block in self.tables.get(request_id, ()) if block is not None]

    def others_held(self, request_id: str) -> int:
        return 0

    def others_most(self, num_tokens: int) -> int:
        return 0

    def others_settled(self, num_tokens: int) -> int:
        return 0

    def table_state(self, request_id: str) -> TableState:
        held = self.held(request_id)
        held = held[: len(held) - self.num_spare]
        return TableState(held, [self.refs[block] for block in held], [self.indexed[block] for block in held])

    def take(self) -> int:
        block = self.refs.index(0)
        self.refs[block], self.indexed[block] = 1, False
        return block

    def shrink(self, plan: CompactionPlan[str]) -> Shrunk:
        request_id = plan.seq_id
        old, free = self.held(request_id), self.num_free
        for block in plan.strip:
            self.indexed[block] = False
        targets = [self.take() if block is None else block for block in plan.targets]
        assert all(self.refs[block] == 1 and not self.indexed[block] for block in targets)
        targets += old[len(old) - self.num_spare :]
        holes = len(self.tables[request_id]) - len(targets)
        self.tables[request_id] = [*targets, *[None] * holes]
        for block in old:
            self.refs[block] -= block not in targets
        return Shrunk(tuple(targets), self.num_free - free)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Places for the tokens, as vLLM counts them; False if the pool is full."""
        table = self.tables.setdefault(request_id, [])
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > self.num_free:
            return False
        table.extend(self.take() for _ in range(missing))
        return True

    def drop(self, request_id: str) -> None:
        for block in self.held(request_id):
            self.refs[block] -= 1
        self.tables.pop(request_id, None)

    def check(self) -> None:
        counted = [block for name in self.tables for block in self.held(name)]
        assert [counted.count(block) for block in range(self.num_blocks)] == self.refs
        assert all(len(set(self.held(name))) == len(self.held(name)) for name in self.tables)


def make_ledger(num_blocks: int = 129, **fields: Any) -> Ledger:
    """streaming_llm with a budget of 256, blocks of 32, chunks of 2,048 tokens."""
    given = {"policy": "streaming_llm", "budget": 256, **fields}
    return Ledger(Options.read(given, "the test"), ListPool(num_blocks, 32), 32, 2048)


def computed(ledger: Ledger, name: str, prompt: int, count: int, wanted: Any = None) -> FakeRequest:
    """A request of which count tokens are computed and lie in the ledger's pool."""
    request = FakeRequest(name, prompt, wanted)
    assert ledger.pool.grow(name, count)
    request.grow(count)
    return request
