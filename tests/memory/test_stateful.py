"""Any order of operations leaves memory and shadow equal."""

from __future__ import annotations

import hashlib
import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvreclaim.memory import eviction_orders

from .world import World

TOKENS = st.lists(st.integers(0, 1), max_size=16)
SEED = st.integers(0, 2**32 - 1)
PICK = st.integers(0, 7)
SALT = st.sampled_from([None, "", "a"])


def three_bits(message: bytes) -> bytes:
    """Eight digests for everything."""
    return bytes([hashlib.sha256(message).digest()[0] & 7])


def constant(message: bytes) -> bytes:
    return b""


class MemoryMachine(RuleBasedStateMachine):
    """A rule that needs a sequence begins one if none lives; one that begins a ninth ends the first."""

    world: World

    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 4),
        caching=st.sampled_from([True, True, True, False]),
        colliding=st.sampled_from([None, None, None, three_bits, constant]),
        order=st.sampled_from(eviction_orders()),
        fraction=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    )
    def build(self, num_blocks, block_size, caching, colliding, order, fraction):
        self.world = World(
            num_blocks,
            block_size,
            caching=caching,
            colliding=colliding,
            order="lru" if colliding else order,
            max_pinned_fraction=fraction,
        )

    def pick(self, number):
        if not self.world.live:
            assert self.world.start([0], None) is not None
        return self.world.live[number % len(self.world.live)]

    def start(self, tokens, salt, max_tokens=None, priority=0):
        if len(self.world.live) >= 8:
            self.world.free(self.world.live[0])
        self.world.start(tokens, salt, max_tokens, priority)

    @rule(tokens=TOKENS, salt=SALT, max_tokens=st.none() | st.integers(0, 9), priority=st.integers(-1, 2))
    def admit(self, tokens, salt, max_tokens, priority):
        self.start(tokens, salt, max_tokens, priority)

    @rule(
        number=PICK,
        retention=st.lists(st.tuples(st.integers(0, 16), st.sampled_from([1, 3.5, 20]))),
        owner=st.sampled_from([None, "a", "b"]),
    )
    def pin(self, number, retention, owner):
        self.world.pin(self.pick(number), retention, owner)

    @rule(seconds=st.sampled_from([0.5, 1, 2, 5]))
    def time_passes(self, seconds):
        self.world.now += seconds

    @rule(number=PICK, cut=st.integers(0, 16), more=TOKENS, salt=SALT, same=st.booleans())
    def hit(self, number, cut, more, salt, same):
        """Ask with the beginning of what a live sequence has, as the same tenant or another."""
        sequence = self.world.shadow.sequences[self.pick(number)]
        self.start(sequence.tokens[:cut] + more, sequence.salt if same else salt)

    @rule(number=PICK, tokens=TOKENS)
    def finish_and_ask_again(self, number, tokens):
        """The next turn of a conversation."""
        sequence = self.world.shadow.sequences[seq_id := self.pick(number)]
        self.world.free(seq_id)
        self.start(sequence.tokens + tokens, sequence.salt)

    @rule(number=PICK, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def grow_and_commit(self, number, tokens):
        """A pool that is full preempts the last come."""
        if not self.world.extend(self.pick(number), tokens):
            self.world.preempt(self.world.live[-1])

    @rule(number=PICK, num_tokens=st.integers(0, 9))
    def grow(self, number, num_tokens):
        self.world.grow(self.pick(number), num_tokens)

    @rule(number=PICK)
    def fork(self, number):
        seq_id = self.pick(number)
        if len(self.world.live) < 8:
            self.world.fork(seq_id)

    @rule(number=PICK, seed=SEED)
    def compress(self, number, seed):
        self.world.shrink(self.pick(number), random.Random(seed))

    @rule(number=PICK, seed=SEED)
    def drop(self, number, seed):
        self.world.drop(self.pick(number), random.Random(seed))

    @rule(number=PICK)
    def preempt(self, number):
        self.world.preempt(self.pick(number))

    @rule(number=PICK, num_tokens=st.integers(0, 9))
    def abort(self, number, num_tokens):
        """Between growth and commit."""
        seq_id = self.pick(number)
        self.world.grow(seq_id, num_tokens)
        self.world.free(seq_id)

    @rule(number=PICK, kind=st.integers(0, 7))
    def seldom(self, number, kind):
        if kind == 0:
            self.world.reset_prefix_cache()
        elif kind == 1:
            self.world.mark_inexact(self.pick(number))

    @invariant()
    def memory_is_sound(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for seq_id in self.world.live:
            self.world.free(seq_id)
        self.world.check()
        stats = self.world.memory.stats()
        assert stats.free + stats.cached == stats.num_blocks


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
