"""Savings of tables of their own for layers with sliding windows, and hits of conversations: the
engine's memory manager alone, in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any, Final

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.groups.window import WindowGroup, WindowTable
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.windows import ChunkedWindow, Window, grouping

Row = dict[str, Any]
SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A model's layers: so many, every `pattern`-th with full attention, and bytes of a token in a layer."""

    num_layers: int
    pattern: int
    window: Window
    token_bytes: int

    @property
    def windows(self) -> list[Window | None]:
        return [self.window if (n + 1) % self.pattern else None for n in range(self.num_layers)]


SHAPES: Final = MappingProxyType(
    {
        "gpt-oss-20b": GroupShape(24, 2, Window(128), 2 * 8 * 64 * 2),
        "gemma-2-9b": GroupShape(42, 2, Window(4096), 2 * 8 * 256 * 2),
        "gemma-3-4b": GroupShape(34, 6, Window(1024), 2 * 4 * 256 * 2),
        "gemma-3-27b": GroupShape(62, 6, Window(1024), 2 * 16 * 128 * 2),
        "llama-4-scout": GroupShape(48, 4, ChunkedWindow(8192), 2 * 8 * 128 * 2),
    }
)
"""Shapes in bf16, from the models' configurations."""
CONTEXTS: Final = (8192, 32_768, 131_072)
STEP: Final = 2048
DECODED: Final = 16
"""Tokens of an answer that are computed at once here."""
AT_ONCE: Final = 4
ENDLESS: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GroupsPlan:
    """Conversations that take turns; question, answer: tokens of each, on average."""

    conversations: int = 30
    turns: int = 5
    question: int = 200
    answer: int = 4000
    seed: int = 0


def held_bytes(shape: GroupShape, num_tokens: int, *, grouped: bool) -> int:
    """Bytes that one sequence of so many tokens holds while its last one is computed, as the memory manager
    counts its blocks."""
    found = grouping(shape.windows) if grouped else None
    windows = () if found is None else found.windows
    layers = shape.num_layers if found is None else len(found.full)
    memory = MemoryManager(
        shape.num_layers * blocks_for(num_tokens + STEP, SIZE),
        SIZE,
        enable_prefix_caching=False,
        windows=windows,
    )
    memory.admit(0, memory.match_prefix(memory.keys([0])))
    for start in range(0, num_tokens - 1, STEP):
        memory.grow(0, min(STEP, num_tokens - 1 - start))
        memory.commit(0, min(STEP, num_tokens - 1 - start))
    memory.grow(0, 1)
    return memory.num_blocks(0) * layers * SIZE * shape.token_bytes


class LastOut(WindowGroup):
    """vLLM's order: whatever has left a window goes behind all other cached blocks."""

    def _release_unseen(self, own: WindowTable, first: int) -> None:
        own.tails = tuple(range(own.end + 1))
        super()._release_unseen(own, first)


@dataclass(slots=True)
class Chat:
    """One conversation. tokens: those of all turns so far; turns: tokens of each question and answer."""

    tokens: list[int]
    turns: list[tuple[int, int]]
    seq_id: int = -1
    end: int = 0
    hit: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True)
class GroupConversations:
    """All conversations over one memory, AT_ONCE at a time."""

    plan: GroupsPlan
    memory: MemoryManager
    chats: list[Chat] = field(default_factory=list)
    _last: int = 0
    _token: int = 0

    def __post_init__(self) -> None:
        random = Random(self.plan.seed)
        mean_question, mean_answer = self.plan.question, self.plan.answer
        for _ in range(self.plan.conversations):
            lengths = [
                (random.randint(1, 2 * mean_question - 1), random.randint(1, 2 * mean_answer - 1))
                for _ in range(self.plan.turns)
            ]
            self.chats.append(Chat([], lengths))

    def run(self) -> int:
        """Returns: tokens that were hit."""
        for turn in range(self.plan.turns):
            for first in range(0, len(self.chats), AT_ONCE):
                chats = self.chats[first : first + AT_ONCE]
                for chat in chats:
                    self._add_request(chat, turn)
                while sum(map(self._step, chats)):
                    pass
                for chat in chats:
                    self.memory.free(chat.seq_id)
        return sum(chat.hit for chat in self.chats)

    def _add_request(self, chat: Chat, turn: int) -> None:
        question, answer = chat.turns[turn]
        self._append(chat, question)
        chat.seq_id, chat.end = self._last, len(chat.tokens) + answer
        self._last += 1
        keys = self.memory.keys(chat.tokens)
        match = self.memory.match_prefix(keys)
        self.memory.admit(chat.seq_id, match)
        chat.hit += match.num_tokens
        chat.prompt_tokens += len(chat.tokens)

    def _append(self, chat: Chat, count: int) -> None:
        chat.tokens += range(self._token, self._token + count)
        self._token += count

    def _step(self, chat: Chat) -> bool:
        """Compute the known tokens, or append the next ones. Returns: whether it goes on."""
        done = self.memory.table(chat.seq_id).logical_len
        if done == len(chat.tokens):
            if done == chat.end:
                return False
            self._append(chat, min(DECODED, chat.end - done))
        count = min(STEP, len(chat.tokens) - done)
        self.memory.grow(chat.seq_id, count)
        self.memory.commit(chat.seq_id, count)
        self.memory.release_copy_sources()
        return True


def hit_rows(plan: GroupsPlan, occupancies: Sequence[float] = (0.25, 0.5, 0.9)) -> list[Row]:
    """Hit tokens over those of a pool without end, for pools of which the conversations' blocks, with the
    windows behind their last questions and answers, fill such a share."""
    rows = []
    for name in ("gpt-oss-20b", "gemma-3-4b"):
        found = grouping(SHAPES[name].windows)
        assert found is not None, f"{name} has windows"
        endless = GroupConversations(plan, MemoryManager(ENDLESS, SIZE, windows=found.windows))
        most = endless.run()
        kept = sum(_kept(chat, found.windows) for chat in endless.chats)
        for occupancy in occupancies:
            num_blocks = int(kept / occupancy)
            ours = GroupConversations(plan, MemoryManager(num_blocks, SIZE, windows=found.windows)).run()
            memory = MemoryManager(num_blocks, SIZE, windows=found.windows, window_group=LastOut)
            others = GroupConversations(plan, memory).run()
            rows.append(
                {"model": name, "occupancy": occupancy, "blocks": num_blocks, "hit_tokens": ours}
                | {"share": ours / most, "share_last_out": others / most, "most": most}
            )
    return rows


def _kept(chat: Chat, windows: tuple[Window, ...]) -> int:
    end = blocks_for(len(chat.tokens), SIZE)
    return end + sum(2 * window.num_blocks * (end - window.first_entry(end, SIZE)) for window in windows)
