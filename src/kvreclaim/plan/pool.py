"""Memory that a card leaves for blocks, and what the blocks hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.groups.state_slots import StateSlots, most_sequences
from kvreclaim.plan import words
from kvreclaim.plan.cards import Card
from kvreclaim.plan.cost import Linear, StepLoad
from kvreclaim.plan.demand import Cache
from kvreclaim.plan.shapes import ModelShape
from kvreclaim.plan.weights import WeightFormat, weight_bytes

Binds = Literal["memory", "bandwidth", "compute"]
ACTIVATION_FACTOR, EXPERT_FACTOR = 13, 22
"""Bytes of activations at the peak are 2 T hidden x this: of vLLM 0.6 on a 3090 107 kB a token of an 8B model
(issue 10517); with experts as AIConfigurator has it."""
OTHER_BYTES = 1_020_000_000
"""Runtime, graphs, logits: with the above 1.15 GiB, as vLLM 0.19 takes beside an 8B model on a 4090."""
LEAST_ACTIVATION = 70 << 20
DEFAULT_SEATS = 256
MOST_CARDS = 64


@dataclass(frozen=True, slots=True)
class Seats:
    """Sequences that may run, and what recurrent layers keep of them and for prefix hits.

    each:        slots of a running sequence, those for drafts included
    drafts:      slots of each for drafts
    checkpoints: for prefix hits; None: as many as sequences
    """

    max_num_seqs: int = DEFAULT_SEATS
    each: int = 2
    checkpoints: int | None = None
    interval: int = 0
    drafts: int = 0

    def slots(self, num_seqs: int) -> StateSlots:
        """Slots for num_seqs running sequences."""
        return StateSlots.of(num_seqs, self.each, self.checkpoints, self.interval, self.drafts)


@dataclass(frozen=True, slots=True)
class CardPool:
    """Memory of one card (of each, where there are several), and its blocks.

    block_bytes: of this card's part of a block
    num_seqs:    that may run: max_num_seqs, or as many as have room for their states
    states:      slots of recurrent layers, each of state_bytes on this card; None: the model has none
    """

    memory_bytes: int
    utilization: float
    weight_bytes: int
    other_bytes: int
    block_bytes: int
    block_size: int
    num_seqs: int = DEFAULT_SEATS
    states: StateSlots | None = None
    state_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes for blocks and states; below 0 if the weights alone do not fit."""
        taken = self.weight_bytes + self.other_bytes
        return int(self.memory_bytes * self.utilization) - taken

    @property
    def states_bytes(self) -> int:
        """Bytes of all slots."""
        return self.states.num_slots * self.state_bytes if self.states else 0

    @property
    def kv_bytes(self) -> int:
        """Bytes for blocks."""
        return self.cache_bytes - self.states_bytes

    @property
    def num_blocks(self) -> int:
        return max(0, self.kv_bytes // self.block_bytes) if self.num_seqs else 0

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size


def parallel_sizes(shape: ModelShape) -> list[int]:
    """Numbers of cards that tensor parallelism takes, as in vLLM: they divide the query heads, and divide or
    are divided by the KV heads."""
    heads = {(layer.num_heads, layer.num_kv_heads) for layer in shape.attention}
    return [
        size
        for size in range(1, MOST_CARDS + 1)
        if all(not queries % size and (not kv % size or not size % kv) for queries, kv in heads)
    ]


def roomy_pool(
    what: str, shape: ModelShape, num_cards: int, build: Callable[[int], CardPool], least: int = 1
) -> CardPool:
    """The pool of so many cards.

    what: a card's name; build: the pool of a number of cards; least: blocks of a pool that is suggested

    Raises: InvalidArgumentError with the number of cards that have room if there is none for a block, or if
    the heads cannot be divided.
    """
    sizes = parallel_sizes(shape)
    first = shape.attention[0]
    require(
        num_cards in sizes,
        f"tensor_parallel_size is {num_cards}, which does not divide the {first.num_heads} heads and "
        f"{first.num_kv_heads} KV heads of {shape.name}; pass one of {', '.join(map(str, sizes))}.",
        "tensor_parallel_size",
    )
    pool = build(num_cards)
    if pool.num_blocks > 0:
        return pool
    found = next((n for n in sizes if n > num_cards and build(n).num_blocks >= least), None)
    remedy = f"not even {sizes[-1]} such cards have room; "
    if found is not None:
        each = words.size(build(found).weight_bytes)
        remedy = (
            f"pass --tensor-parallel-size {found} for {found} such cards with weights of {each} each, or "
        )
    states = "" if pool.num_seqs else ", and states of a sequence take more than half of the rest"
    raise InvalidArgumentError(
        f"{shape.name} does not fit on {words.count(num_cards, 'card')} of {what}: {pool.utilization:g} of "
        f"{words.size(pool.memory_bytes)} have no room for weights of {words.size(pool.weight_bytes)}, other "
        f"{words.size(pool.other_bytes)} and a block of {words.size(pool.block_bytes)} per card{states}; "
        f"{remedy}take --weights in fewer bits or a larger card.",
        field="tensor_parallel_size",
    )


def activation_bytes(cache: Cache) -> int:
    """Estimate the bytes of one step of max_chunk tokens without weights and blocks."""
    factor = EXPERT_FACTOR if cache.shape.has_experts else ACTIVATION_FACTOR
    return max(LEAST_ACTIVATION, 2 * cache.footprint.max_chunk * cache.shape.hidden_size * factor)


def other_estimate(cache: Cache) -> int:
    """Estimate the bytes without weights and blocks."""
    return OTHER_BYTES + activation_bytes(cache)


def make_pool(
    cache: Cache,
    memory_bytes: int,
    weights: WeightFormat,
    *,
    utilization: float,
    other_bytes: int | None = None,
    num_cards: int = 1,
    seats: Seats = Seats(),
) -> CardPool:
    """num_cards: tensor parallel; weights, KV heads and states are divided, a latent is not."""
    heads = min(layer.num_kv_heads for layer in cache.shape.attention)
    parts = min(num_cards, heads)
    pool = CardPool(
        memory_bytes=memory_bytes,
        utilization=utilization,
        weight_bytes=-(-weight_bytes(cache.shape, weights).total // num_cards),
        other_bytes=other_estimate(cache) if other_bytes is None else other_bytes,
        block_bytes=-(-cache.block_bytes // parts),
        block_size=cache.block_size,
        num_seqs=seats.max_num_seqs,
    )
    if not cache.shape.has_states:
        return pool
    each = -(-cache.state_bytes // num_cards)
    room = max(0, pool.cache_bytes) // 2 // each
    most = min(seats.max_num_seqs, most_sequences(room, seats.each, seats.checkpoints))
    return replace(pool, num_seqs=most, states=seats.slots(most), state_bytes=each)


@dataclass(frozen=True, slots=True)
class Fit:
    """Contents of a pool.

    max_tokens:    of one sequence, whatever positions the model has; None: a budget sets no end
    max_sequences: at once, each of `each` tokens while decoding
    prompt_blocks: at most while one of their prompts is computed
    """

    max_tokens: int | None
    max_sequences: int
    each: int
    each_blocks: int
    prompt_blocks: int
    prompt_fits: bool


def fit(cache: Cache, pool: CardPool, each: int, *, prefix: int = 0) -> Fit:
    """Sequences of `each` tokens, a shared prefix of them counted once where nothing is evicted."""
    blocks = cache.blocks(each)
    full = prefix // cache.block_size if blocks * cache.block_size >= each else 0
    at_once = max(0, pool.num_blocks - full) // max(1, blocks - full)
    if pool.states is not None:
        at_once = min(at_once, pool.num_seqs)
    peak = cache.prompt_blocks(each)
    bounded = cache.footprint.bounded
    enough = cache.prompt_blocks(1 << 40) <= pool.num_blocks if bounded else True
    return Fit(
        max_tokens=None if bounded and enough else pool.num_slots,
        max_sequences=at_once,
        each=each,
        each_blocks=blocks,
        prompt_blocks=peak,
        prompt_fits=peak <= pool.num_blocks,
    )


def binds(time: Linear, found: Fit, held: int) -> Binds:
    """Return what limits tokens per second while as many sequences decode as fit.

    compute: their products take longer than reading weights and keys. bandwidth: reading their keys takes
    longer than reading the weights, so another sequence adds to the time what it adds to the tokens. memory:
    neither; with more of it more sequences would share one reading of the weights.
    """
    num = found.max_sequences
    if num == 0:
        return "memory"
    keys = time.kv * num * held
    read = time.step_s(StepLoad(1, 1, 0))
    longer = time.step_s(StepLoad(num, num, 0))
    knee = getattr(time, "dense", time.base) / getattr(time, "flop", time.beyond or 1e-30)
    if num >= knee and longer - read >= keys:
        return "compute"
    return "bandwidth" if keys >= longer else "memory"


def card_memory(card: Card | None, memory_bytes: int | None) -> int:
    """Raises: InvalidArgumentError where neither is given."""
    if memory_bytes is not None:
        return memory_bytes
    if card is None:
        raise InvalidArgumentError("the size of the memory is not known; pass --gpu or --memory-bytes.")
    return card.usable_bytes
