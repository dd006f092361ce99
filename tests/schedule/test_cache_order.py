"""The scheduling policy `cache`: more in the cache is earlier, and no request is overtaken by much."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from serving import SIZE, Serving

from kvreclaim.schedule.cache_first import BOUND_STEPS
from kvreclaim.schedule.queue import WINDOW

BUDGET = 4096
COMMON, OTHER = list(range(1000)), list(range(10_000, 11_000))


def warm(served: Serving, tokens: list[int]) -> None:
    """Have the cache hold them."""
    served.ask(None, prompt=tokens, max_tokens=1)
    while served.sequences and any(not request.ended for request in served.requests.values()):
        served.step()


def run_clock(served: Serving, until: int) -> None:
    """Set the clock as if so many prompt tokens had been processed."""
    served.scheduler._state.clock = until


def test_the_golden_example() -> None:
    """A (cold), B (900 of 1000 there), C (cold, the last), D (shares 800 with A): B, A, C, then D on A's."""
    served = Serving(policy="cache", max_num_batched_tokens=BUDGET)
    warm(served, OTHER[:912])
    names = {}
    for name, arrival, prompt in (
        ("A", 0, COMMON),
        ("D", 200, COMMON[:800] + [7] * 200),
        ("B", 500, OTHER),
        ("C", 900, [9] * 200),
    ):
        run_clock(served, arrival)
        names[served.ask(None, prompt=prompt, max_tokens=1).name] = name
    run_clock(served, 1000)
    served.begun.clear()
    served.step()
    assert [names[name] for name in served.begun] == ["B", "A", "C"]
    served.step()
    assert [names[name] for name in served.begun] == ["B", "A", "C", "D"]
    tokens = {names[name]: count for name, count in served.computed.items() if name in names}
    assert tokens == {"A": 1000, "B": 1000 - 912, "C": 200, "D": 200}


def test_fcfs_takes_the_same_as_they_came() -> None:
    served = Serving(max_num_batched_tokens=BUDGET)
    warm(served, OTHER[:912])
    served.begun.clear()
    names = [served.ask(None, prompt=prompt, max_tokens=1).name for prompt in ([9] * 200, OTHER, [8] * 200)]
    served.step()
    assert served.begun == names


def test_the_more_important_are_first_whatever_is_cached() -> None:
    served = Serving(policy="cache", max_num_batched_tokens=BUDGET)
    warm(served, OTHER[:912])
    served.begun.clear()
    cold = served.ask(None, prompt=[9] * 200, priority=-1, max_tokens=1)
    warmer = served.ask(None, prompt=OTHER, max_tokens=1)
    urgent = served.ask(None, prompt=[8] * 200, priority=-2, max_tokens=1)
    served.step()
    assert served.begun == [urgent.name, cold.name, warmer.name]


def test_each_tenant_has_an_order_of_its_own() -> None:
    served = Serving(policy="cache", max_num_seqs=2)
    warm(served, OTHER[:912])
    served.begun.clear()
    cold = [served.ask(tenant, prompt=[50 + n] * 200, max_tokens=9) for n, tenant in enumerate("ab")]
    hot = [served.ask(tenant, prompt=[*OTHER[:912], n], max_tokens=9) for n, tenant in enumerate("ab")]
    while len(served.begun) < 4:
        served.step()
    assert served.begun == [one.name for one in (*hot, *cold)]


class Overtaking:
    """A few sequences of few texts, in a small pool; records which overtakes which."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.budget = random.choice((32, 64, 200))
        self.served = Serving(
            random.choice((60, 200)), policy="cache", max_num_seqs=3, max_num_batched_tokens=self.budget
        )
        self.texts = [[text * 1000 + n for n in range(400)] for text in range(3)]
        self.counts: Counter[str] = Counter()

    @property
    def scheduler(self):
        return self.served.scheduler

    def ask(self) -> None:
        random = self.random
        text = random.choice((*self.texts, [random.randrange(10**6)] * 300))
        prompt = text[: random.choice((16, 100, 300))] + [random.randrange(10**6)] * random.randrange(1, 40)
        self.served.ask(None, prompt=prompt, max_tokens=random.randrange(1, 20))

    def step(self) -> None:
        waiting = {seq.seq_id: seq for seq in self.scheduler.waiting}
        plan = self.served.step()
        begun = [waiting[one.seq_id] for one in plan.admitted]
        left = [seq for seq in waiting.values() if seq in self.scheduler.waiting and seq.awaits is None]
        bound = BOUND_STEPS * self.budget
        for seq in begun:
            for other in left:
                ahead = seq.arrived_at - other.arrived_at
                assert ahead <= bound, f"{seq.request_id} overtakes {other.request_id}, {ahead} later"
                self.counts["overtakes"] += seq.rank > other.rank

    def run(self) -> Counter[str]:
        for _ in range(400):
            if self.random.random() < 0.35 and len(self.scheduler.waiting) < 40:
                self.ask()
            self.step()
        return self.counts


@pytest.mark.parametrize("seed", range(12))
def test_no_sequence_is_overtaken_by_much(seed: int) -> None:
    """Not by what arrived more than 8 steps full of prompt tokens later, whatever is cached."""
    assert Overtaking(seed).run()["overtakes"] > 0


def test_without_the_bound_it_would_be() -> None:
    """The property above can fail: with credit for all that is cached a cold one waits on and on."""
    world = Overtaking(0)
    world.scheduler.waiting.order.aging = 100
    with pytest.raises(AssertionError, match="overtakes"):
        world.run()


def test_a_prompt_is_looked_up_again_only_when_the_index_has_changed() -> None:
    served = Serving(policy="cache", max_num_seqs=2)
    served.ask(None, num_prompt=SIZE, max_tokens=3 * SIZE)
    served.step()
    others = served.ask(None, num_prompt=SIZE, max_tokens=3 * SIZE, num_outputs=2)  # no seats for it yet
    for number in range(3 * WINDOW):
        served.ask(None, prompt=[number] * 40, max_tokens=1)
    looked, match = [], served.memory.match_prefix
    served.memory.match_prefix = lambda *args, **options: looked.append(1) or match(*args, **options)
    served.step()
    assert len(looked) == WINDOW, "no seat for the first one"
    looked.clear()
    served.step()
    assert not looked, "nothing has changed"
    served.steps(SIZE - 2)
    assert not looked, "the block is not full yet"
    served.step()
    assert len(looked) == WINDOW
    assert others.first_token is None


def test_those_behind_the_window_get_their_turn() -> None:
    """Many wait for one that computes their prefix: a request behind all of them does not."""
    served = Serving(policy="cache", max_num_seqs=4 * WINDOW)
    for _ in range(2 * WINDOW):
        served.ask(None, prompt=COMMON, max_tokens=1)
    other = served.ask(None, num_prompt=20, max_tokens=1)
    served.step()
    assert other.first_token == 1
