"""Eviction methods: the effect of a policy on memory."""

from __future__ import annotations

from enum import Enum


class EvictionMethod(Enum):
    """A policy's effect on memory. Callers read these attributes, never a policy's name.

    evicts:       there are passes that evict tokens and free blocks
    moves:        survivors slide together, into unshared blocks
    uneven:       heads keep unequal numbers of tokens
    whole_blocks: tokens are evicted in whole blocks, the same in all layers and heads; the blocks are
                  known and freed once the policy has chosen, not when the pass is planned
    sparse_reads: each decode step reads only some blocks
    keeps_all:    neither evicts nor reads sparsely
    equal_heads:  every head keeps equally many tokens, which slide together
    fixes_mode:   the method decides which heads share a kept set
    """

    KEEP = "keep", ""
    """Keeps all tokens."""
    COMPACT = "compact", "evicts moves"
    """Every head keeps equally many tokens, which slide together; the other blocks are freed."""
    BLOCKS = "blocks", "evicts whole_blocks"
    """Evicts whole blocks and moves nothing."""
    CELLS = "cells", "evicts moves uneven"
    """Heads keep unequal numbers of tokens, in whole cells of the sequence's blocks."""
    READS = "reads", "sparse_reads"
    """Keeps all tokens; each decode step reads only some blocks."""

    def __new__(cls, value: str, *_: str) -> EvictionMethod:
        method = object.__new__(cls)
        method._value_ = value
        return method

    def __init__(self, _value: str, answers: str) -> None:
        yes = answers.split()
        self.evicts = "evicts" in yes
        self.moves = "moves" in yes
        self.uneven = "uneven" in yes
        self.whole_blocks = "whole_blocks" in yes
        self.sparse_reads = "sparse_reads" in yes
        self.keeps_all = not yes
        self.equal_heads = self.moves and not self.uneven
        self.fixes_mode = self.uneven or self.whole_blocks or self.sparse_reads
