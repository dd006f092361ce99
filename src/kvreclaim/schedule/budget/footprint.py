"""Arithmetic of budgets: when a sequence is compressed, the slots it holds until then, its longest length.

Due points depend only on the sequence's own lengths, so a request makes the same choices alone, in a batch,
and when it is recomputed.

A policy that compresses only the prompt (prompt_only) has one due point, the end of a prompt longer than the
budget. Nothing is evicted before, so the whole prompt must fit, and nothing after, so the sequence grows by
all generated tokens. A policy that reads sparsely has none; its prompts are cut where sparse reads begin.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from fractions import Fraction

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.windows import Window
from kvreclaim.schedule.budget.account import EvictionCounters
from kvreclaim.schedule.budget.drops import Drops
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.protection import kept_prompt_slots
from kvreclaim.schedule.budget.sparse import SparseRows

SAME = Fraction(1)
"""Density of the model's own dtype."""


def budget_in_blocks(budget: int, block_size: int, protected: int) -> int:
    """Round the budget of unequal heads, which keep whole blocks: to the nearest multiple of the block size
    (a tie rounds down) with room for an unprotected token."""
    nearest = (budget + (block_size - 1) // 2) // block_size * block_size
    return max(nearest, (protected // block_size + 1) * block_size)


def share_in_blocks(
    share: float, num_prompt: int, block_size: int, always: int, density: Fraction = SAME
) -> int:
    """Convert a share of the prompt's bytes in the model's dtype to a budget in whole blocks: at least one
    token more than the protected ones.

    density: KVBytes.density of the cache's format
    """
    blocks = int(Fraction(str(share)) * num_prompt * density) // block_size
    return max(blocks, blocks_for(always + 1, block_size)) * block_size


def sinks_in_blocks(num_tokens: int, room: int, block_size: int) -> int:
    """Round these first tokens up to sinks in whole blocks, up to half of the room."""
    return min(blocks_for(num_tokens, block_size), room // 2 // block_size) * block_size


@dataclass(frozen=True, slots=True)
class Footprint:
    """The growth and compression of one request's cache. Lengths are in tokens per layer and KV head.

    eviction_method, budget, interval, prompt_only, sinks, recent, protect_prompt: of its compression
    window:     queries before the first pass that must be computed, not hit, at least 1; None: all of them
    block_size: slots per block
    max_chunk:  most tokens of one step
    offset:     tokens by which the first pass after the prompt comes early, below interval, so that requests
                that arrive together are not due together; later passes keep this distance
    compress_prompt_at: prompt tokens after which a pass always runs, if it evicts something; 0: none.
                With prompt_only it is the only pass
    keep_at:    prompt length at which a step ends, so that a snapshot can be kept; 0: none
    aligned:    (inside vLLM) evict multiples of the block size, so that later tokens keep their places within
                blocks; no chunk is cut at a due point, and unequal heads leave the open block in place
    windows:    of sliding-window layers, in blocks of the same pool, compressed or not
    trailing:   the widest window if all layers have one; an uncompressed sequence then holds no more
    sparse:     the sparsely computed rows of the prompt; blocks after them are not shared
    shareable_until: leading tokens in shareable blocks; None: all
    drops:      spans that leave the cache, at the latest at shareable_until; None: no drops
    """

    eviction_method: EvictionMethod = EvictionMethod.KEEP
    budget: int = 0
    interval: int = 1
    prompt_only: bool = False
    sinks: int = 0
    recent: int = 0
    protect_prompt: bool = False
    window: int | None = 1
    block_size: int = 16
    max_chunk: int = 2048
    offset: int = 0
    aligned: bool = False
    compress_prompt_at: int = 0
    keep_at: int = 0
    windows: tuple[Window, ...] = ()
    trailing: Window | None = None
    sparse: SparseRows | None = None
    shareable_until: int | None = None
    drops: Drops | None = None

    def dropping(self, drops: Drops) -> Footprint:
        """Return the footprint of a request that drops spans of its prompt."""
        return replace(self, drops=drops, shareable_until=drops.at)

    def drops_now(self, num_computed: int, num_prompt: int, account: EvictionCounters) -> bool:
        """Whether spans are dropped at the present length: at their place, and before each earlier pass, so
        that no dropped token is moved."""
        if self.drops is None or num_computed > self.drops.at:
            return False
        return num_computed == self.drops.at or self.is_due(num_computed, num_prompt, account)

    def window_start(self, num_computed: int) -> int:
        """Tokens before the first one that a later token attends to, of those that may be freed."""
        if self.trailing is None or not self.eviction_method.keeps_all:
            return 0
        return self.trailing.first_seen(num_computed)

    @property
    def bounded(self) -> bool:
        """Whether the held tokens stay near the budget at any length."""
        return self.eviction_method.evicts and not self.prompt_only

    @property
    def decode_cap(self) -> int:
        """Live tokens at which a sequence is compressed after its prompt; under alignment, less than a block
        would free nothing."""
        return self.budget + (max(self.interval, self.block_size) if self.aligned else self.interval)

    @property
    def all_exact(self) -> bool:
        """Whether every token is computed by full attention, so that its blocks may be shared."""
        return self.shareable_until is None and self.sparse is None and not self.eviction_method.sparse_reads

    @property
    def prompt_cap(self) -> int:
        """Live tokens at which a sequence is compressed between two chunks of its prompt."""
        return self.decode_cap if self.aligned else self.budget + max(self.interval, self.max_chunk)

    @property
    def most_tokens(self) -> int | None:
        """Most tokens held at any time; None: the whole length, or the whole prompt."""
        if not self.bounded:
            return None
        return self.decode_cap - 1 + self.max_chunk if self.aligned else max(self.prompt_cap, self.decode_cap)

    def _due_at(self, num_prompt: int, last_computed: int) -> int:
        """Live tokens at the next due point after the prompt."""
        return self.decode_cap - (self.offset if last_computed <= num_prompt else 0)

    def is_due(self, num_computed: int, num_prompt: int, account: EvictionCounters) -> bool:
        """Whether a sequence is compressed at its present length."""
        if not self.eviction_method.evicts:
            return False
        in_prompt = num_computed < num_prompt
        if self.compress_prompt_at and (self.prompt_only or num_computed == self.compress_prompt_at):
            live = num_computed - account.num_evicted
            at = num_computed == self.compress_prompt_at and account.last_computed < num_computed
            return at and self.kept(live) < live
        if self.prompt_only:
            there = num_prompt - account.num_dropped
            worth = there - self.budget >= (self.block_size if self.aligned else 1)
            return worth and not in_prompt and account.last_computed == 0
        live = num_computed - account.num_evicted
        return live >= (self.prompt_cap if in_prompt else self._due_at(num_prompt, account.last_computed))

    def sparse_rows(self, num_prompt: int) -> range:
        """Tokens of a prompt that read some of the blocks before them."""
        return range(0) if self.sparse is None else self.sparse.rows(num_prompt, self.compress_prompt_at)

    def shared_until(self, num_prompt: int) -> int | None:
        """Leading tokens computed as in any request with the same salt; None: all."""
        if self.shareable_until is not None:
            return self.shareable_until
        return None if self.sparse is None else self.sparse_rows(num_prompt).stop

    def tokens_until_pass(self, num_computed: int, num_prompt: int, account: EvictionCounters) -> int:
        """Most tokens that may be computed before the next pass is considered, or before they are no longer
        shareable."""
        most, end = self._until_pass(num_computed, num_prompt, account), self.shared_until(num_prompt) or 0
        return min(most, end - num_computed) if num_computed < end else most

    def _until_pass(self, num_computed: int, num_prompt: int, account: EvictionCounters) -> int:
        prompt_left = num_prompt - num_computed
        if self.eviction_method.sparse_reads:
            whole = max(num_prompt, self.budget) - num_computed
            return whole if whole > 0 else self.max_chunk
        if not (self.eviction_method.evicts or self.keep_at > num_computed):
            return self.max_chunk
        places = [at for at in (self.compress_prompt_at, self.keep_at) if at > num_computed]
        if places:
            rest = replace(self, compress_prompt_at=0, keep_at=0)
            return min(min(places) - num_computed, rest._until_pass(num_computed, num_prompt, account))
        if self.prompt_only:
            return prompt_left if prompt_left > 0 else self.max_chunk
        live = num_computed - account.num_evicted
        if prompt_left > 0:
            return min(prompt_left, max(1, self.prompt_cap - live))
        return max(1, self._due_at(num_prompt, account.last_computed) - live)

    def reads_sparsely(self, num_computed: int, num_prompt: int) -> bool:
        """Whether the next tokens read only some blocks, so that they are not exact."""
        return self.eviction_method.sparse_reads and num_computed >= max(num_prompt, self.budget)

    def first_pass(self, num_prompt: int) -> int | None:
        """Logical length at the first compression; None: never."""
        if not self.eviction_method.evicts:
            return None
        at = self.compress_prompt_at
        if self.prompt_only:
            end = at or num_prompt
            return end if end > self.budget else None
        if at and self.kept(at) < at:
            return min(at, replace(self, compress_prompt_at=0).first_pass(num_prompt) or at)
        return min(self.prompt_cap, max(num_prompt, self._due_at(num_prompt, 0)))

    def hit_limit(self, num_prompt: int, known: int) -> int:
        """Most leading tokens that a prefix hit may cover without changing the result: nothing computed under
        sparse reads is replaced by exact blocks, and the first pass has all its signals."""
        if (end := self.shared_until(num_prompt)) is not None:
            known = min(known, end if self.drops is None else end - 1)
        if self.eviction_method.sparse_reads:
            return min(known, max(num_prompt, self.budget))
        first = self.first_pass(num_prompt)
        if first is None:
            return known
        return 0 if self.window is None else min(known, max(0, first - max(1, self.window)))

    def hit_end(self, num_tokens: int) -> int:
        """Round the tokens of a prefix hit down to an allowed end."""
        return num_tokens if self.sparse is None else self.sparse.aligned(0, num_tokens, num_tokens + 1)

    def exact_until(self, num_prompt: int, known: int) -> int:
        """Leading tokens computed as in any other request with the same salt: by full attention, or equally
        sparsely."""
        if (end := self.shared_until(num_prompt)) is not None:
            known = min(known, end)
        if self.eviction_method.sparse_reads:
            return min(known, max(num_prompt, self.budget))
        return min(known, self.first_pass(num_prompt) or known)

    def window_slots(self, known: int, chunk: int | None = None) -> int:
        """Most slots of a sequence's blocks for its windows. chunk: tokens computed at once; None: the
        maximum."""
        chunk = min(self.max_chunk, known) if chunk is None else chunk
        return sum(w.most_blocks(known, chunk, self.block_size) for w in self.windows) * self.block_size

    def slots_needed(self, num_prompt: int, known: int) -> int:
        """Most slots that a sequence holds on its way to these lengths, without its windows."""
        if self.eviction_method.keeps_all and self.trailing is not None:
            most = self.trailing.most_blocks(known, min(self.max_chunk, known), self.block_size)
            return min(known, most * self.block_size)
        if not self.eviction_method.evicts:
            if self.drops is None or known <= self.drops.at:
                return known
            return max(self.drops.at, known - self.drops.num_in_blocks(self.block_size))
        if self.aligned:
            return known if self.most_tokens is None else min(known, self.most_tokens)
        if self.prompt_only:
            end = self.compress_prompt_at or num_prompt
            return max(end, known - max(0, end - self.budget))
        return max(min(num_prompt, self.prompt_cap), min(known, self.decode_cap))

    def kept(self, live: int) -> int:
        """Tokens kept by a pass over that many."""
        gone = max(0, live - self.budget)
        if self.aligned:
            gone = gone // self.block_size * self.block_size
        elif self.eviction_method.whole_blocks:
            gone = blocks_for(gone, self.block_size) * self.block_size
        return live - gone

    def kept_prompt(self, live: int, prompt_slots: int, keep: int) -> int:
        """Prompt slots kept by a pass that keeps `keep` of `live`: protection.py."""
        return kept_prompt_slots(
            num_tokens=live,
            prompt_slots=prompt_slots,
            keep=keep,
            sinks=self.sinks,
            recent=self.recent,
            protect_prompt=self.protect_prompt,
        )

    @property
    def least_budget(self) -> int:
        """Tokens in the blocks that are protected, or always read, wherever the newest token lies."""
        size = self.block_size
        sinks = blocks_for(self.sinks, size)
        if self.eviction_method.sparse_reads:
            return (1 + max(1, sinks) + blocks_for(self.recent - 1, size)) * size
        return sinks * size + self.recent + size - 1 if self.eviction_method.whole_blocks else 0


def excess_slots(num_prompt: int, length: int, footprint: Footprint, num_blocks: int) -> int:
    """Slots that the whole pool lacks for a sequence on its way to this length; not positive: enough."""
    needed = footprint.slots_needed(num_prompt, length)
    if footprint.windows:
        needed = blocks_for(needed, footprint.block_size) * footprint.block_size + footprint.window_slots(
            length
        )
    return needed - num_blocks * footprint.block_size


def longest_sequence(num_prompt: int | None, limit: int, footprint: Footprint, num_blocks: int) -> int:
    """Most tokens, prompt included, of one sequence in the pool, at most `limit`.

    num_prompt: tokens of its prompt; None: any number
    """

    def excess(length: int) -> int:
        prompt = length if num_prompt is None else num_prompt
        return excess_slots(prompt, length, footprint, num_blocks)

    return bisect_right(range(1, limit + 1), 0, key=excess)


def most_blocks(width: int, num_prompt: int, length: int, footprint: Footprint) -> int:
    """Blocks of that many sequences of this length, which share a prompt's full blocks until a pass makes a
    block their own."""
    size = footprint.block_size
    windows = width * (footprint.window_slots(length) // size)
    each = blocks_for(footprint.slots_needed(num_prompt, length), size)
    first_pass = footprint.first_pass(num_prompt)
    if footprint.eviction_method.moves and first_pass is not None and first_pass < length:
        return windows + width * each
    shared = num_prompt // size
    return windows + shared + width * (blocks_for(length, size) - shared)


def check_blocks(footprint: Footprint, name: str) -> None:
    """Raise InvalidArgumentError for an eviction method that these blocks cannot serve."""
    size, budget, interval = footprint.block_size, footprint.budget, footprint.interval
    uneven, least = footprint.eviction_method.uneven, footprint.least_budget
    if uneven and interval < size:
        raise InvalidArgumentError(
            f"interval is {interval} tokens, but under {name} heads trade whole blocks of {size}, "
            f"and would have none to trade after the first pass; raise the interval to at least {size}.",
            field="compression",
        )
    if budget < least:
        raise InvalidArgumentError(
            f"budget is {budget} tokens, but {name} goes by whole blocks of {size}, and those of "
            f"{footprint.sinks} sinks and {footprint.recent} recent tokens may take {least}; raise the "
            f"budget to {least}, or lower recent or block_size.",
            field="compression",
        )
