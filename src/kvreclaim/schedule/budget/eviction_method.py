"""Eviction methods: what a policy does to memory."""

from __future__ import annotations

from enum import Enum


class EvictionMethod(Enum):
    """How a policy changes memory. Callers ask the method's attributes, never a policy's name.

    evicts:       there are passes, and they evict tokens
    reclaims:     evicted tokens give their blocks back
    moves:        survivors slide together, into blocks that nobody else reads
    uneven:       heads keep unequal numbers of tokens
    whole_blocks: tokens go by whole blocks, the same in all layers and heads
    sparse_reads: each decode step reads some blocks only
    settles_after_choice: a pass frees its blocks once the policy has chosen, not when it is planned
    keeps_all:    neither evicts nor reads sparsely
    shortens:     live tokens lie without gaps; else evicted ones stay in their slots, masked
    equal_heads:  every head keeps equally many tokens, which slide together
    fixes_mode:   the method decides which heads share a kept set
    """

    KEEP = "keep", ""
    """Keeps all tokens."""
    COMPACT = "compact", "evicts reclaims moves"
    """Every head keeps equally many tokens, which slide together; the other blocks go back."""
    MASK = "mask", "evicts settles_after_choice"
    """Attention skips evicted tokens and nothing moves: a block goes back once all its tokens are evicted."""
    BLOCKS = "blocks", "evicts reclaims whole_blocks settles_after_choice"
    """Evicts whole blocks and moves nothing."""
    CELLS = "cells", "evicts reclaims moves uneven"
    """Heads keep unequal numbers of tokens, in whole cells of the sequence's blocks."""
    READS = "reads", "sparse_reads"
    """Keeps all tokens; each decode step reads some blocks only."""

    def __new__(cls, value: str, *_: str) -> EvictionMethod:
        method = object.__new__(cls)
        method._value_ = value
        return method

    def __init__(self, _value: str, answers: str) -> None:
        yes = answers.split()
        self.evicts = "evicts" in yes
        self.reclaims = "reclaims" in yes
        self.moves = "moves" in yes
        self.uneven = "uneven" in yes
        self.whole_blocks = "whole_blocks" in yes
        self.sparse_reads = "sparse_reads" in yes
        self.settles_after_choice = "settles_after_choice" in yes
        self.keeps_all = not yes
        self.shortens = self.reclaims or not self.evicts
        self.equal_heads = self.moves and not self.uneven
        self.fixes_mode = self.uneven or self.whole_blocks or self.sparse_reads
