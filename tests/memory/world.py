"""Drives a MemoryManager and the shadow together; everything the one says is compared with the other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest

from kvreclaim.memory import BlockKeys, CompactionPlan, MemoryManager, PrefixMatch, Retention
from kvreclaim.memory.prefix.index import HashFunction, sha256

from .sequences import token_list
from .shadow import Shadow, ShadowSequence
from .world_check import check_world, count_misses


class World:
    """caching: with prefix caching. colliding: a hash function that makes digests meet, so that the
    shadow can't foretell which prefixes are indexed and learns it from the manager instead; in least
    recently used order and without pins. now: what the clock says."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        colliding: HashFunction | None = None,
        order: str = "lru",
        max_pinned_fraction: float = 0.5,
    ) -> None:
        self.now = 0.0
        self.memory = MemoryManager(
            num_blocks,
            block_size,
            enable_prefix_caching=caching,
            fingerprint="model",
            hash_function=colliding or sha256,
            eviction_policy=order,
            max_pinned_fraction=max_pinned_fraction,
            clock=lambda: self.now,
        )
        self.shadow = Shadow(
            num_blocks, block_size, caching, order, int(max_pinned_fraction * num_blocks), lambda: self.now
        )
        self.misses: Counter[str] = Counter()
        self.predictable = colliding is None
        self.ids = count()

    @property
    def live(self) -> list[int]:
        return list(self.shadow.sequences)

    def start(
        self, tokens: Sequence[int], salt: str | None, max_tokens: int | None = None, priority: int = 0
    ) -> int | None:
        """Admit a prompt and write all of it. Returns: its id, None if the pool is too full."""
        return self._admit(self.memory.keys(list(tokens), salt), max_tokens, priority)

    def _admit(self, keys: BlockKeys, max_tokens: int | None, priority: int) -> int | None:
        tokens, salt = token_list(keys), keys.salt
        match = self._match(keys, max_tokens)
        rest = len(tokens) - match.num_tokens
        queued = sum(1 for block in match.block_ids if block in self.shadow.order)
        size = self.shadow.block_size
        needed = -(-len(tokens) // size) - len(match.block_ids)
        fits = needed <= len(self.shadow.order) - queued
        assert self.memory.can_admit(match, rest) == fits
        if not fits:
            return None
        seq_id = next(self.ids)
        self.memory.admit(seq_id, match, priority=priority)
        count_misses(self, match, tokens, salt, max_tokens)
        self._shadow_admit(seq_id, match, tokens, salt)
        self._shadow_hit(seq_id, priority)
        assert self.extend(seq_id, tokens[match.num_tokens :]), "can_admit is true, can_grow is false"
        return seq_id

    def _shadow_hit(self, seq_id: int, priority: int) -> None:
        shadow, sequence = self.shadow, self.shadow.sequences[seq_id]
        sequence.priority = priority
        for block in sequence.held():
            shadow.queue.used(block, priority)
            if self.predictable:
                sequence.entries.append(shadow.nodes[shadow.path_of_block[block]])
        shadow.pins.refresh(sequence.held())

    def pin(self, seq_id: int, retention: Sequence[tuple[int, float]], owner: str | None = None) -> None:
        if self.predictable:
            self.memory.pin(seq_id, [Retention(*kept) for kept in retention], owner)
            self.shadow.pin(self.shadow.sequences[seq_id], retention, owner)

    def _match(self, keys: BlockKeys, max_tokens: int | None) -> PrefixMatch:
        tokens, salt = token_list(keys), keys.salt
        match = self.memory.match_prefix(keys, max_tokens=max_tokens)
        limit = len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)
        if self.predictable:
            assert list(match.block_ids) == self.shadow.match(salt, tokens, limit)
        assert match.num_tokens <= max(0, limit)
        found = [content for block in match.block_ids for content in self.shadow.contents[block]]
        assert found == self.shadow.expected(salt, tokens[: match.num_tokens]), "a hit holds other tokens"
        return match

    def _shadow_admit(self, seq_id: int, match: PrefixMatch, tokens: Sequence[int], salt: str | None) -> None:
        shadow = self.shadow
        for block in match.block_ids:
            shadow.touch(block)
        contents = shadow.expected(salt, tokens[: match.num_tokens])
        path = contents[-1] if contents else shadow.path("salt", salt)
        node = shadow.root
        if self.predictable and contents:
            node = shadow.nodes[path].number
        shadow.sequences[seq_id] = ShadowSequence(
            salt,
            path,
            node if shadow.caching else None,
            list(tokens[: match.num_tokens]),
            list(contents),
            list(match.block_ids),
            match.num_tokens,
        )
        shadow.queries += len(tokens)
        shadow.hits += match.num_tokens

    def grow(self, seq_id: int, num_tokens: int) -> bool:
        """Make room. Returns: whether there was enough."""
        shadow, sequence = self.shadow, self.shadow.sequences[seq_id]
        append, shared = shadow.missing(seq_id, num_tokens)
        fits = append + shared <= len(shadow.order)
        assert self.memory.can_grow(seq_id, num_tokens) == fits
        if not fits:
            return False
        fresh = shadow.allocate(append + shared)
        copies: tuple[tuple[int, int], ...] = ()
        if shared:
            index = len(sequence.contents) // shadow.block_size
            source, copy = sequence.blocks[index], fresh.pop(0)
            assert source is not None
            copies = ((source, copy),)
            shadow.contents[copy] = list(shadow.contents[source])
            sequence.blocks[index] = copy
            shadow.release([source])
            shadow.copies += 1
        sequence.blocks += fresh
        growth = self.memory.grow(seq_id, num_tokens)
        assert growth.new_blocks == tuple(fresh)
        assert growth.copies == copies
        self.memory.release_copy_sources()
        return True

    def extend(self, seq_id: int, tokens: Sequence[int]) -> bool:
        """Grow, write the tokens, commit. Returns: whether there was room; if not, nothing changed."""
        if not self.grow(seq_id, len(tokens)):
            return False
        shadow, sequence = self.shadow, self.shadow.sequences[seq_id]
        self._learn_index()
        for token in tokens:
            sequence.path = shadow.path(sequence.path, token) if sequence.exact else shadow.lossy()
            index, slot = divmod(len(sequence.contents), shadow.block_size)
            block = sequence.blocks[index]
            assert block is not None
            shadow.write(block, slot, sequence.path)
            sequence.contents.append(sequence.path)
            sequence.tokens.append(token)
            sequence.logical_len += 1
            if self.predictable and slot == shadow.block_size - 1 and sequence.node is not None:
                shadow.enter(sequence, index)
        known = token_list(self.memory.table(seq_id).keys)
        known += tokens[len(known) - (sequence.logical_len - len(tokens)) :]
        self.memory.commit(seq_id, len(tokens))
        return True

    def fork(self, parent_id: int) -> int:
        shadow, parent = self.shadow, self.shadow.sequences[parent_id]
        child_id = next(self.ids)
        keys = self.memory.table(parent_id).keys
        self.memory.fork(parent_id, child_id, keys.fork(token_list(keys).copy()))
        written = -(-len(parent.contents) // shadow.block_size)
        shadow.sequences[child_id] = child = ShadowSequence(
            parent.salt,
            parent.path,
            parent.node,
            list(parent.tokens),
            list(parent.contents),
            parent.blocks[:written],
            parent.logical_len,
            parent.exact,
            list(parent.entries),
            parent.priority,
        )
        for block in child.held():
            shadow.touch(block)
        return child_id

    def plan(self, seq_id: int, rng: random.Random) -> tuple[CompactionPlan, list[int]]:
        """A plan with every kind of target, and the slots that survive."""
        sequence, size = self.shadow.sequences[seq_id], self.shadow.block_size
        slots = [i for i, content in enumerate(sequence.contents) if content is not None]
        kept = sorted(rng.sample(slots, rng.randint(0, len(slots))))
        own = [block for block in sequence.held() if self.memory.pool.refs[block] == 1]
        rng.shuffle(own)
        targets = tuple(
            own.pop() if own and rng.random() < 0.75 else None for _ in range(-(-len(kept) // size))
        )
        strip = tuple(b for b in targets if b is not None and b in self.memory.pool.index)
        return CompactionPlan(seq_id, len(kept), targets, strip), kept

    def shrink(self, seq_id: int, rng: random.Random) -> int | None:
        """Compress. Returns: blocks freed, None if the pool is too full."""
        plan, kept = self.plan(seq_id, rng)
        shadow, sequence = self.shadow, self.shadow.sequences[seq_id]
        fits = plan.targets.count(None) <= len(shadow.order)
        if not fits:
            with pytest.raises(AssertionError, match="fresh blocks wanted"):
                self.memory.shrink(plan)
            return None
        shrunk = self.memory.shrink(plan)
        for block in plan.strip:
            shadow.unindex(block)
        fresh = shadow.allocate(plan.targets.count(None))
        supply = iter(fresh)
        blocks = [next(supply) if target is None else target for target in plan.targets]
        assert list(shrunk.block_ids) == blocks
        survivors = [shadow.stored(sequence, slot) for slot in kept]
        assert survivors == [sequence.contents[i] for i in kept], "a source was reused before it was read"
        freed = shadow.release([b for b in reversed(sequence.held()) if b not in blocks]) - len(fresh)
        assert shrunk.blocks_freed == freed
        shadow.freed += freed
        sequence.blocks, sequence.contents = list(blocks), survivors
        sequence.exact, sequence.node = False, None
        self._learn_index()
        for i, content in enumerate(survivors):
            shadow.write(blocks[i // shadow.block_size], i % shadow.block_size, content)
        return freed

    def drop(self, seq_id: int, rng: random.Random) -> int:
        shadow, sequence = self.shadow, self.shadow.sequences[seq_id]
        size = shadow.block_size
        full = len(sequence.contents) // size
        chosen = rng.sample(range(full), rng.randint(0, full))
        freed = self.memory.drop_blocks(seq_id, chosen)
        dropped = [sequence.blocks[i] for i in sorted(chosen, reverse=True)]
        assert freed == shadow.release([block for block in dropped if block is not None])
        shadow.freed += freed
        for i in sorted(chosen, reverse=True):
            del sequence.blocks[i]
            del sequence.contents[i * size : (i + 1) * size]
        sequence.exact, sequence.node = False, None
        return freed

    def mark_inexact(self, seq_id: int) -> None:
        self.memory.mark_inexact(seq_id)
        sequence = self.shadow.sequences[seq_id]
        sequence.exact, sequence.node = False, None

    def free(self, seq_id: int) -> int:
        sequence = self.shadow.sequences.pop(seq_id)
        freed = self.memory.free(seq_id)
        assert freed == self.shadow.release(sequence.held()[::-1])
        return freed

    def preempt(self, seq_id: int) -> int | None:
        """Free a sequence and compute all its tokens anew. Returns: its new id, None if it waits."""
        sequence, keys = self.shadow.sequences[seq_id], self.memory.table(seq_id).keys
        assert token_list(keys) == sequence.tokens
        self.free(seq_id)
        return self._admit(keys, None, sequence.priority)

    def reset_prefix_cache(self) -> None:
        self.memory.reset_prefix_cache()
        self.shadow.reset_index()

    def _learn_index(self) -> None:
        """Take from the manager, with colliding digests, which blocks are indexed, but not what they hold."""
        if not self.predictable:
            shadow = self.shadow
            shadow.path_of_block = {entry.block: 0 for entry in self.memory.pool.index}

    def check(self) -> None:
        """Structure, order, counts, index, every sequence's content and the statistics."""
        self._learn_index()
        check_world(self)
