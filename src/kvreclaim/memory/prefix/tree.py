"""The prefix index as a radix tree: cached prefixes and the sequences that hold them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from kvreclaim.memory.prefix.index import Entry, PrefixIndex


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of consecutive blocks without a branch; its holders hold all of them.

    salt:      salt of the prefix
    token_ids: tokens in these blocks; a prompt is the concatenation of its nodes from the top down
    blocks:    block ids, in order
    holders:   caller's names of the sequences that hold the blocks; empty: only cached
    children:  continuations, the most held first, then the longest
    """

    salt: str | None
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    holders: tuple[str, ...]
    children: tuple[PrefixNode, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that hold these blocks."""
        return len(self.holders)

    def lines(self, level: int = 0) -> list[str]:
        """Return the node and its descendants, one indented line each."""
        found: list[str] = []
        stack = [(level, self)]
        while stack:
            depth, node = stack.pop()
            held = f"{node.num_sequences} running" if node.holders else "cached"
            found.append(f"{'  ' * depth}{node.num_tokens} tokens, {len(node.blocks)} blocks, {held}")
            stack += [(depth + 1, child) for child in reversed(node.children)]
        return found


def prefix_tree(index: PrefixIndex, holders: Mapping[int, tuple[str, ...]]) -> tuple[PrefixNode, ...]:
    """Return the prefix index as trees, one or more nodes for each salt. O(blocks in the index).

    holders: block -> names of its holders; blocks without a holder are absent. Unreachable entries are left
    out.
    """
    children: dict[int, list[Entry]] = {}
    for entry in index:
        children.setdefault(entry.parent, []).append(entry)
    root = index.root(None).serial
    runs: list[tuple[list[Entry], int]] = []  # (entries, place of the run before them), parents first
    stack = [(entry, -1) for entry in children.get(root, [])]
    while stack:
        entry, above = stack.pop()
        run, after = [entry], children.get(entry.serial, [])
        while len(after) == 1 and holders.get(after[0].block) == holders.get(entry.block):
            run.append(after[0])
            after = children.get(after[0].serial, [])
        runs.append((run, above))
        stack += [(each, len(runs) - 1) for each in after]
    return _nodes(runs, holders)


def _nodes(
    runs: list[tuple[list[Entry], int]], holders: Mapping[int, tuple[str, ...]]
) -> tuple[PrefixNode, ...]:
    """Build nodes from runs; a run comes after its parent."""
    below: dict[int, list[PrefixNode]] = {}
    for place in range(len(runs) - 1, -1, -1):
        run, above = runs[place]
        tokens = array("q")
        for entry in run:
            tokens.frombytes(entry.tokens)
        node = PrefixNode(
            run[0].salt,
            tuple(tokens),
            tuple(entry.block for entry in run),
            holders.get(run[0].block, ()),
            _sorted(below.pop(place, [])),
        )
        below.setdefault(above, []).append(node)
    return _sorted(below.get(-1, []))


def _sorted(nodes: list[PrefixNode]) -> tuple[PrefixNode, ...]:
    return tuple(sorted(nodes, key=lambda node: (-node.num_sequences, -node.num_tokens, node.token_ids)))
