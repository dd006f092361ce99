"""A second, slow memory: plain lists and whole prefixes instead of links and digests.

It also holds what each slot contains. A token's K/V depend on its salt and on every token before it,
so an exact slot's content is the number of that path in a trie; a lossy one is a number of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count

from .naive_orders import NAIVE
from .naive_pins import NaivePins


@dataclass
class ShadowSequence:
    """contents: per written slot; None in a hole. node: where hashing stands; None: it has ended.
    entries: nodes that the leading full blocks were served from or entered as."""

    salt: str | None
    path: int
    node: int | None
    tokens: list[int] = field(default_factory=list)
    contents: list[int | None] = field(default_factory=list)
    blocks: list[int | None] = field(default_factory=list)
    logical_len: int = 0
    exact: bool = True
    entries: list[Node] = field(default_factory=list)
    priority: int = 0

    def held(self) -> list[int]:
        return [block for block in self.blocks if block is not None]


@dataclass(frozen=True)
class Node:
    """An indexed block: its number, and its parent's."""

    block: int
    number: int
    parent: int


class Shadow:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool,
        order: str = "lru",
        max_pinned: int = 0,
        clock: Callable[[], float] = float,
    ) -> None:
        self.num_blocks, self.block_size, self.caching = num_blocks, block_size, caching
        self.queue = NAIVE[order](num_blocks)
        self.pins = NaivePins(max_pinned, clock)
        self.refs: Counter[int] = Counter()
        self.contents: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.sequences: dict[int, ShadowSequence] = {}
        self.nodes: dict[int, Node] = {}
        self.path_of_block: dict[int, int] = {}
        self.numbers = count(1)
        self.root = 0
        self.paths: dict[Hashable, int] = {}
        self.evicted: list[int] = []
        self.peak = self.evictions = self.queries = self.hits = self.freed = self.copies = 0

    def path(self, *key: Hashable) -> int:
        """The number of (path, token), or of a salt's root."""
        return self.paths.setdefault(key, len(self.paths) + 1)

    def expected(self, salt: str | None, tokens: Sequence[int]) -> list[int]:
        """What the slots of these tokens contain if they are computed exactly."""
        path, contents = self.path("salt", salt), []
        for token in tokens:
            path = self.path(path, token)
            contents.append(path)
        return contents

    def lossy(self) -> int:
        return self.path("lossy", len(self.paths))

    @property
    def order(self) -> list[int]:
        """The blocks without references, as they would be reused."""
        return self.pins.sequence(self.queue)

    def allocate(self, n: int) -> list[int]:
        taken = [self.pins.take(self.queue) for _ in range(n)]
        for block in taken:
            path = self.path_of_block.get(block)
            if path is not None:
                self.evicted = [*(old for old in self.evicted if old != path), path]
                self.queue.forgot(block)
                self._remove(block)
                self.evictions += 1
            self.refs[block] = 1
            self.contents[block] = [None] * self.block_size
        self.peak = max(self.peak, self.num_blocks - len(self.order))
        return taken

    def touch(self, block: int) -> None:
        if block in self.pins.aside:
            self.pins.aside.remove(block)
        elif self.refs[block] == 0:
            self.queue.remove(block)
        self.refs[block] += 1
        self.peak = max(self.peak, self.num_blocks - len(self.order))

    def release(self, blocks: Sequence[int]) -> int:
        before = len(self.order)
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                del self.refs[block]
                self.queue.push(block)
        return len(self.order) - before

    def write(self, block: int, slot: int, content: int | None) -> None:
        """The rule that everything serves: neither a shared nor an indexed block is ever written."""
        assert self.refs[block] == 1, f"block {block} is written, {self.refs[block]} hold it"
        assert block not in self.path_of_block, f"block {block} is written, it is indexed"
        self.contents[block][slot] = content

    def stored(self, sequence: ShadowSequence, slot: int) -> int | None:
        """What the block that holds this slot contains there; a hole contains nothing."""
        block = sequence.blocks[slot // self.block_size]
        return None if block is None else self.contents[block][slot % self.block_size]

    def unindex(self, block: int) -> None:
        """Take the block out of the index, if it is there."""
        if block in self.path_of_block:
            self._remove(block)
            self.queue.forgot(block)

    def _remove(self, block: int) -> None:
        self.nodes.pop(self.path_of_block.pop(block), None)
        self.pins.ends.pop(block, None)

    def reset_index(self) -> None:
        for block in [node.block for node in self.nodes.values()]:
            self.unindex(block)
        self.evicted.clear()
        self.root = next(self.numbers)

    def match(self, salt: str | None, tokens: Sequence[int], limit: int) -> list[int]:
        """The blocks of the longest indexed prefix of at most limit tokens."""
        parent, blocks = self.root, []
        contents = self.expected(salt, tokens[: max(0, limit)])
        for end in range(self.block_size, len(contents) + 1, self.block_size):
            node = self.nodes.get(contents[end - 1])
            if node is None or node.parent != parent:
                break
            blocks.append(node.block)
            parent = node.number
        return blocks

    def enter(self, sequence: ShadowSequence, index: int) -> None:
        """Table entry index of a sequence that is still hashed became full."""
        path = sequence.contents[(index + 1) * self.block_size - 1]
        block, parent = sequence.blocks[index], sequence.node
        assert path is not None
        assert block is not None
        assert parent is not None
        if parent != self.root and all(node.number != parent for node in self.nodes.values()):
            sequence.node = None
            return
        node = self.nodes.get(path)
        if node is None or node.parent != parent:
            if node is not None:
                self.unindex(node.block)
            node = self.nodes[path] = Node(block, next(self.numbers), parent)
            self.path_of_block[block] = path
            self.queue.entered(block, sequence.priority)
        else:
            self.queue.used(node.block, sequence.priority)
        sequence.node = node.number
        sequence.entries.append(node)

    def pin(
        self, sequence: ShadowSequence, retention: Sequence[tuple[int, float]], owner: str | None
    ) -> None:
        for i, node in enumerate(sequence.entries):
            ttls = [ttl_s for num_tokens, ttl_s in retention if num_tokens // self.block_size > i]
            if not ttls or node not in self.nodes.values():
                return
            self.pins.pin(node.block, max(ttls), owner)

    def reasons(self, salt: str | None, tokens: Sequence[int], matched: int, limit: int) -> set[str]:
        """Why the next full block after so many matched tokens may have been missed. Of what was evicted
        at least the last num_blocks prefixes must be remembered, of the others any may be."""
        if not self.caching or matched + self.block_size > limit:
            return {"ineligible"}
        path = self.expected(salt, tokens[: matched + self.block_size])[-1]
        if path in self.nodes or path in self.evicted[-self.num_blocks :]:
            return {"evicted"}
        others = {key[1] for key in self.paths if key[0] == "salt"} if matched == 0 else set()
        firsts = {self.expected(other, tokens[: self.block_size])[-1] for other in others}
        there = {path for path, node in self.nodes.items() if node.parent == self.root}
        known = {"salt"} if firsts & there else {"cold"}
        return known | {"evicted"} if path in self.evicted else known

    def num_cached(self) -> int:
        return sum(1 for block in self.path_of_block if block in self.order)

    def missing(self, seq_id: int, num_tokens: int) -> tuple[int, bool]:
        """Blocks to append before num_tokens more are written, and whether the tail is shared."""
        sequence = self.sequences[seq_id]
        length = len(sequence.contents)
        append = -(-(length + num_tokens) // self.block_size) - len(sequence.blocks)
        index, used = divmod(length, self.block_size)
        tail = sequence.blocks[index] if used else None
        return max(0, append), bool(num_tokens) and tail is not None and self.refs[tail] > 1
