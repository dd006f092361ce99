"""How many blocks the ledger has vLLM leave free when a request is admitted."""

from __future__ import annotations

from collections.abc import Sequence

from list_pool import FakeRequest, computed, make_ledger

from kvreclaim.integrations.vllm.scheduler.ledger import Ledger


def room(ledger: Ledger, newcomer: FakeRequest, running: Sequence[FakeRequest]) -> int | None:
    """In a step of its own, in which nobody is due."""
    assert ledger.compress(running) == []
    return ledger.room(newcomer, running)


def test_caps_follow_the_length_so_far() -> None:
    ledger = make_ledger()
    long, short = FakeRequest("a", 5000), FakeRequest("b", 100)
    caps = ledger.caps(long)
    assert caps is not None
    assert (caps.prefill, caps.settled) == (-(-(256 + 127 + 2048) // 32), 12)
    caps = ledger.caps(short)
    assert caps is not None
    assert (caps.prefill, caps.settled) == (4, 4)
    assert ledger.caps(FakeRequest("c", 5000, "off")) is None


def test_room_admits_what_fits_together_in_the_end() -> None:
    """129 blocks hold ten requests of 12 blocks, but not eleven."""
    ledger = make_ledger()
    running = [computed(ledger, f"r{n}", 100, 383) for n in range(10)]
    newcomer = FakeRequest("new", 800)
    assert ledger.pool.num_free == 129 - 10 * 12
    assert room(ledger, newcomer, running) is None
    ledger.pool.drop("r9")
    assert room(ledger, newcomer, running[:9]) == 0
    assert room(ledger, newcomer, []) == 0
    assert room(ledger, FakeRequest("off", 800, "off"), running) == 0


def test_room_counts_what_is_missing_until_prompts_are_computed() -> None:
    """Five that take another block each, and one whose prompt has just begun."""
    ledger = make_ledger(num_blocks=60)
    running = [computed(ledger, f"r{n}", 100, 256) for n in range(5)]
    for request in running:
        request.grow(1)
    assert ledger.pool.num_free == 60 - 5 * 8
    assert room(ledger, FakeRequest("new", 800), running) == 5
    assert room(ledger, FakeRequest("new", 800), [*running, computed(ledger, "x", 800, 64)]) is None


def test_room_is_vllms_own_for_requests_that_may_never_be_compressed() -> None:
    """However long the others may get, and whatever they share."""
    ledger = make_ledger(num_blocks=40, budget=4096)
    running = [computed(ledger, "a", 640, 640)]
    for n in range(9):
        twin = FakeRequest(f"twin{n}", 640)
        ledger.pool.tables[twin.request_id] = list(ledger.pool.tables["a"])
        for block in ledger.pool.held("a"):
            ledger.pool.refs[block] += 1
        twin.grow(640)
        running.append(twin)
    assert room(ledger, FakeRequest("new", 600), running) == 0
    assert room(ledger, FakeRequest("long", 700), running) is None


def test_room_keeps_a_prompt_under_way_its_peak() -> None:
    ledger = make_ledger()
    half = computed(ledger, "half", 800, 320)
    assert ledger.compress([half]) == []
    assert room(ledger, FakeRequest("new", 800), [half]) == 25 - 10


def test_room_keeps_the_peak_of_a_preempted_request_that_is_computed_again() -> None:
    """It is past its prompt, and still takes whole chunks."""
    ledger = make_ledger()
    back = computed(ledger, "back", 100, 320)
    back.said = 700
    assert room(ledger, FakeRequest("new", 800), [back]) == 25 - 10


def test_newcomers_of_the_same_step_count() -> None:
    """Who was seen before in the step is not looked at again; who has come since is."""
    ledger = make_ledger(num_blocks=48)
    running = [computed(ledger, "a", 800, 64)]
    assert room(ledger, FakeRequest("new", 800), running) == 25 - 2
    running.append(computed(ledger, "b", 800, 320))
    assert ledger.room(FakeRequest("new", 800), running) == 25 - 2 + 25 - 10
    running.append(computed(ledger, "c", 100, 383))
    assert ledger.room(FakeRequest("new", 800), running) == 25 - 2 + 25 - 10
    running.append(computed(ledger, "d", 100, 383))
    assert ledger.room(FakeRequest("new", 800), running) is None
