"""A second, slow memory: plain lists and whole prefixes instead of links and digests.

It also holds what each slot contains. A token's K/V depend on its salt and on every token before it,
so an exact slot's content is the number of that path in a trie; a lossy one is a number of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count


@dataclass
class ShadowSequence:
    """contents: per written slot; None in a hole. node: where hashing stands; None: it has ended."""

    salt: str | None
    path: int
    node: int | None
    tokens: list[int] = field(default_factory=list)
    contents: list[int | None] = field(default_factory=list)
    blocks: list[int | None] = field(default_factory=list)
    logical_len: int = 0
    exact: bool = True

    def held(self) -> list[int]:
        return [block for block in self.blocks if block is not None]


@dataclass(frozen=True)
class Node:
    """An indexed block: its number, and its parent's."""

    block: int
    number: int
    parent: int


class Shadow:
    def __init__(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.num_blocks, self.block_size, self.caching = num_blocks, block_size, caching
        self.order = list(range(num_blocks))
        self.refs: Counter[int] = Counter()
        self.contents: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.sequences: dict[int, ShadowSequence] = {}
        self.nodes: dict[int, Node] = {}
        self.path_of_block: dict[int, int] = {}
        self.numbers = count(1)
        self.root = 0
        self.paths: dict[Hashable, int] = {}
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

    def allocate(self, n: int) -> list[int]:
        taken, self.order = self.order[:n], self.order[n:]
        assert len(taken) == n
        for block in taken:
            self.evictions += self.strip(block)
            self.refs[block] = 1
            self.contents[block] = [None] * self.block_size
        self.peak = max(self.peak, self.num_blocks - len(self.order))
        return taken

    def touch(self, block: int) -> None:
        if block in self.order:
            self.order.remove(block)
        self.refs[block] += 1
        self.peak = max(self.peak, self.num_blocks - len(self.order))

    def release(self, blocks: Sequence[int]) -> int:
        before = len(self.order)
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                del self.refs[block]
                self.order.append(block)
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

    def strip(self, block: int) -> bool:
        """Take the block out of the index. Returns: whether it was there."""
        path = self.path_of_block.pop(block, None)
        if path is not None:
            self.nodes.pop(path, None)
        return path is not None

    def reset_index(self) -> None:
        self.nodes.clear()
        self.path_of_block.clear()
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
                self.strip(node.block)
            node = self.nodes[path] = Node(block, next(self.numbers), parent)
            self.path_of_block[block] = path
        sequence.node = node.number

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
