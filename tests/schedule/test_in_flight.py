"""What one sequence computes no other one computes at the same time, and none waits for it for ever."""

from __future__ import annotations

import pytest
from serving import SIZE, Serving

from kvreclaim.schedule import EvictionMethod, Footprint
from kvreclaim.schedule.in_flight import LEAST_SHARED, MOST_WAITS
from kvreclaim.schedule.scheduler import POLICIES

SHARED = list(range(800))
CHUNK = 400


def prompts(count: int, tail: int = 200) -> list[list[int]]:
    """Return prompts that begin alike."""
    return [SHARED + [5000 + number] * tail for number in range(count)]


class Slow(Serving):
    """A prompt computes CHUNK tokens a step, and there are tokens left for others."""

    def ask(self, *args, chunk: int = CHUNK, **options):
        return super().ask(*args, **{"footprint": Footprint(max_chunk=chunk), **options})


def finish(served: Serving) -> None:
    for _ in range(2000):
        if not served.sequences or all(request.ended for request in served.requests.values()):
            return
        served.step()
    raise AssertionError(f"{len(served.scheduler.waiting)} wait for ever")


def computed(served: Serving) -> list[int]:
    """Prompt tokens that each request has computed; its answer is one token."""
    return list(served.computed.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_shared_beginning_is_computed_once(policy) -> None:
    served = Slow(policy=policy)
    for prompt in prompts(5):
        served.ask(None, prompt=prompt, max_tokens=1)
    finish(served)
    assert computed(served) == [1000, 200, 200, 200, 200]
    assert served.scheduler.in_flight.num_waits == 4


def test_those_behind_go_on_meanwhile() -> None:
    served = Slow()
    first, second = (served.ask(None, prompt=prompt, max_tokens=4) for prompt in prompts(2, tail=10))
    other = served.ask(None, num_prompt=20, max_tokens=4)
    while other.first_token is None:
        served.step()
    assert (first.first_token, second.first_token, other.first_token) == (None, None, 1)
    served.steps(3)
    assert (first.first_token, second.first_token) == (3, 3)  # as soon as what they share is there


@pytest.mark.parametrize(
    ("shared", "waits"), [(LEAST_SHARED - 1, False), (LEAST_SHARED, True), (LEAST_SHARED + 1, True)]
)
def test_little_is_not_worth_it_and_counts_behind_what_is_there(shared, waits) -> None:
    for known in (0, 10 * SIZE):
        served = Slow()
        if known:
            served.ask(None, prompt=SHARED[:known], max_tokens=1)
            finish(served)
        for number in range(2):
            served.ask(None, prompt=SHARED[: known + shared] + [9000 + number] * SIZE, max_tokens=1)
        finish(served)
        assert served.scheduler.in_flight.num_waits == waits, known


def test_another_salt_does_not_wait() -> None:
    served = Slow()
    for salt in ("a", "b", "a"):
        served.ask(None, prompt=SHARED, max_tokens=1, cache_salt=salt)
    finish(served)
    assert computed(served) == [800, 800, SIZE]


@pytest.mark.parametrize(
    ("first", "second", "num_waits"),
    [
        ({}, {"max_prefix_hit": 0}, 0),
        ({"max_prefix_hit": 0}, {}, 1),
        ({}, {"footprint": Footprint(EvictionMethod.COMPACT, budget=100, window=None)}, 0),
        ({"footprint": Footprint(EvictionMethod.COMPACT, budget=100, interval=16, max_chunk=16)}, {}, 1),
        ({"footprint": Footprint(EvictionMethod.COMPACT, budget=40, interval=16, max_chunk=16)}, {}, 0),
    ],
    ids=["wants all rows", "owner wants all rows", "may hit nothing", "up to a pass", "pass too early"],
)
def test_only_what_will_be_found_and_used_is_waited_for(first, second, num_waits) -> None:
    served = Slow()
    served.ask(None, prompt=SHARED, max_tokens=1, **first)
    served.ask(None, prompt=SHARED, max_tokens=1, **second)
    served.step()
    assert served.scheduler.in_flight.num_waits == num_waits
    assert len(served.scheduler.waiting) == num_waits or not num_waits


def abort(served: Serving, owner) -> None:
    served.scheduler.remove(owner)


def lose_index(served: Serving, owner) -> None:
    served.memory.reset_prefix_cache()


def become_inexact(served: Serving, owner) -> None:
    served.memory.mark_inexact(owner.seq_id)


def stall(served: Serving, owner) -> None:
    """It computes nothing any more."""
    owner.last_step -= 2


@pytest.mark.parametrize("happens", [abort, lose_index, become_inexact, stall])
def test_what_happens_to_the_owner_ends_the_wait(happens) -> None:
    served = Slow()
    first, second = (served.ask(None, prompt=SHARED, max_tokens=1, chunk=100) for _ in range(2))
    served.steps(2)
    owner, waiting = first.sequences[0], second.sequences[0]
    assert waiting.awaits is not None
    assert waiting.awaits.owner is owner
    happens(served, owner)
    if happens is lose_index:
        served.step()  # seen when the next block would be entered
    served.scheduler.schedule()
    assert waiting.awaits is None
    assert waiting in served.scheduler.running


def test_who_waits_for_one_that_ends_waits_for_the_next() -> None:
    served = Slow()
    requests = [served.ask(None, prompt=SHARED, max_tokens=1) for _ in range(4)]
    served.step()
    served.scheduler.remove(requests[0].sequences[0])
    served.sequences.pop(requests[0].sequences[0].seq_id)
    del served.requests[requests[0].name]
    finish(served)
    assert computed(served)[1:] == [400, SIZE, SIZE]


def test_no_sequence_waits_more_than_so_many_times() -> None:
    served = Slow()
    owner, waiting = (served.ask(None, prompt=SHARED, chunk=16).sequences[0] for _ in range(2))
    for number in range(1, MOST_WAITS + 1):
        served.step()
        assert (waiting.num_awaited, waiting.awaits is None) == (number, False)
        served.scheduler.remove(owner)
        owner = served.ask(None, prompt=SHARED, chunk=16).sequences[0]
        served.scheduler.waiting.remove(owner)
        served.scheduler.waiting.add_back(owner)  # before the one that waits
    served.step()
    assert {seq.seq_id for seq in served.scheduler.running} == {owner.seq_id, waiting.seq_id}


def test_a_tenant_that_waits_keeps_its_turn() -> None:
    """Two tenants ask for the same text; then it is the second one's turn, not the first one's again."""
    served = Slow(max_num_seqs=2)
    served.ask("a", prompt=SHARED, max_tokens=100)
    served.ask("b", prompt=SHARED, max_tokens=100)
    for _ in range(10):
        served.ask("a", num_prompt=10, max_tokens=4)
    finish(served)
    ask = served.requests["b-1"]
    assert ask.first_token is not None
    assert ask.first_token <= 2 * len(SHARED) // CHUNK + 4


def test_many_that_wait_cost_little_each() -> None:
    """Each is looked up once; then only the state of its owner is checked."""
    served = Slow(max_num_seqs=256)
    for _ in range(300):
        served.ask(None, prompt=SHARED, max_tokens=1, chunk=40)
    served.step()
    matched, match = [], served.memory.match_prefix
    served.memory.match_prefix = lambda *args, **options: matched.append(1) or match(*args, **options)
    served.steps(10)
    assert not matched
    assert served.scheduler.in_flight.num_waiting == 299
