"""Fair shares of seats, blocks and prompt tokens among tenants, in steps and tokens."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import SIZE, Serving

LEAST = 64
"""Prompt tokens that a tenant may have in a step of 2,048, whichever other tenants have some."""


def flooded(serving: Serving, tenant: str = "flood", prompts: int = 1024, **request) -> Serving:
    """After some steps that this tenant had for itself."""
    for _ in range(prompts):
        serving.ask(tenant, **request)
    serving.steps(20)
    return serving


def test_the_first_token_of_another_comes_in_the_first_step_under_a_flood():
    """1,024 prompts of 64 outputs of 4,000 tokens: all seats are taken when the other one comes."""
    serving = flooded(Serving(), num_outputs=64)
    assert serving.num_running("flood") == 64
    other = serving.ask("other", num_prompt=100, max_tokens=20)
    serving.step()
    assert other.first_token == 1
    assert serving.rows == {"flood": 63, "other": 100}
    assert serving.preempted == {("flood", "fairness"): 1}
    serving.steps(19)
    assert other.ended
    serving.steps(1)
    assert serving.num_running("flood") == 64, "what gave way is back"


def test_the_step_of_a_first_short_prompt_is_short():
    """The latest of the others' sequences decode in the next one; but for those that had got a new block."""
    serving = flooded(Serving(), num_outputs=64)
    for _ in range(3):
        other = serving.ask("other", num_prompt=20, max_tokens=3)
        plan = serving.step()
        assert other.first_token == 1
        assert 20 <= serving.rows["flood"] <= 20 + len(plan.fresh) < 63
        computed = {row.seq_id for row in plan.rows}
        running = serving.scheduler.running
        assert all(seq.seq_id in computed for seq in running[:20]), "the first ones go on"
        serving.steps(2)
        assert serving.rows["flood"] == 63
        assert other.ended


def test_the_more_important_are_not_held_back():
    serving = flooded(Serving(policy="priority"), prompts=40, priority=-1)
    serving.ask("other", num_prompt=20, priority=0)
    serving.step()
    assert serving.rows == {"flood": 40, "other": 20}


def test_the_first_token_comes_while_the_flood_computes_a_prompt_of_64_outputs():
    """Seats that are kept for forks are no seats taken; forks that find none wait."""
    serving = Serving(max_num_batched_tokens=256)
    for _ in range(10):
        serving.ask("flood", num_prompt=1000, num_outputs=64)
    serving.step()
    others = [serving.ask("other", num_prompt=20, max_tokens=40) for _ in range(40)]
    serving.step()
    assert serving.rows["other"] >= 100, "a fair half"
    serving.steps(10)
    assert all(other.first_token is not None and other.first_token <= 8 for other in others[:32])
    assert serving.num_running("flood") == serving.num_running("other") == 32
    assert serving.num_waiting("flood") == 32 + 9
    serving.steps(100)
    assert all(other.ended for other in others)
    assert serving.num_running("flood") == 64


def test_seats_go_half_and_half_and_none_is_preempted_to_and_fro():
    serving = flooded(Serving())
    for _ in range(1024):
        serving.ask("other")
    serving.steps(2)
    assert serving.num_running("flood") == serving.num_running("other") == 32
    serving.steps(1000)
    assert serving.preempted == {("flood", "fairness"): 32}
    serving.ask("third")
    serving.steps(1000)
    assert serving.num_running("third") == 1
    assert sum(serving.preempted.values()) == 33


def test_those_that_gave_way_come_first_in_their_own_line():
    serving = flooded(Serving(max_num_seqs=4), prompts=8)
    begun = [seq.seq_id for seq in serving.scheduler.running]
    for _ in range(2):
        serving.ask("other", max_tokens=5)
    serving.steps(2)
    assert serving.num_running("other") == 2
    assert [seq.seq_id for seq in serving.scheduler.running if seq.tenant == "flood"] == begun[:2]
    serving.steps(6)
    assert sorted(seq.seq_id for seq in serving.scheduler.running) == begun


@pytest.mark.parametrize("num_prompt", [8000, 200])
def test_a_short_prompt_is_computed_in_the_step_of_its_arrival_beside_long_ones(num_prompt):
    """The step has no more of the flood's prompts than of one's own, or a small part of what it could."""
    serving = flooded(Serving(), num_prompt=num_prompt, max_tokens=1)
    assert serving.rows["flood"] == 2048
    other = serving.ask("other", num_prompt=20, max_tokens=3)
    serving.step()
    assert other.first_token == 1
    assert serving.rows["other"] == 20
    assert serving.rows["flood"] <= LEAST
    serving.steps(2)
    assert serving.rows["flood"] >= 2047, "a tenant that only decodes takes no other's prompt tokens"


def test_two_long_prompts_get_equal_parts_of_each_step():
    serving = flooded(Serving(), num_prompt=8000, max_tokens=1)
    other = serving.ask("other", num_prompt=5000, max_tokens=1)
    for _ in range(4):
        serving.step()
        assert serving.rows == {"flood": 1024, "other": 1024}
    serving.step()
    assert other.first_token == 5
    assert serving.rows == {"flood": 5000 - 4096, "other": 5000 - 4096}


def test_by_turns_where_there_is_one_seat():
    """None is preempted; a newcomer waits for one of another's at most, and all take turns."""
    serving = Serving(max_num_seqs=1)
    for _ in range(5):
        serving.ask("a", max_tokens=3)
    serving.step()
    for tenant in "bcb":
        serving.ask(tenant, max_tokens=3)
    order = []
    while serving.scheduler.running or serving.scheduler.waiting:
        plan = serving.step()
        order += [serving.sequences[one.seq_id].tenant for one in plan.admitted]
    assert "".join(str(tenant) for tenant in order) == "bcabaaa"
    assert not serving.preempted


def test_blocks_are_given_way_for_another_prompt():
    """Four hold the whole pool; a prompt that stays within half of it gets room, a larger one waits."""
    serving = Serving(num_blocks=100)
    for _ in range(4):
        serving.ask("flood", num_prompt=24 * SIZE, max_tokens=200)
    serving.step()
    large = serving.ask("other", num_prompt=60 * SIZE, max_tokens=2)
    serving.steps(3)
    assert large.first_token is None
    assert not serving.preempted
    small = serving.ask("third", num_prompt=20 * SIZE, max_tokens=2)
    serving.step()
    assert small.first_token == 1
    assert serving.preempted == {("flood", "fairness"): 1}
    while large.first_token is None:
        serving.step()
    assert serving.num_steps < 210


def test_the_only_sequence_of_a_tenant_never_gives_way():
    serving = Serving(num_blocks=100)
    serving.ask("large", num_prompt=90 * SIZE, max_tokens=100)
    serving.step()
    other = serving.ask("other", num_prompt=20 * SIZE, max_tokens=2)
    serving.steps(98)
    assert (other.first_token, serving.num_running("large")) == (None, 1)
    serving.steps(1)
    assert not serving.num_running("large")
    serving.step()
    assert other.first_token == 100


def test_a_large_prompt_is_not_passed_for_ever():
    """Others that stay within their part begin before it, but not without end."""
    serving = Serving(num_blocks=100, max_num_seqs=4)
    for _ in range(2):
        serving.ask("many", num_prompt=20 * SIZE, max_tokens=7)
    serving.step()
    large = serving.ask("large", num_prompt=90 * SIZE, max_tokens=2)
    begun = 0
    while large.first_token is None:
        if serving.num_waiting("many") < 2:
            serving.ask("many", num_prompt=20 * SIZE, max_tokens=7)
        plan = serving.step()
        begun += sum(serving.sequences[one.seq_id].tenant == "many" for one in plan.admitted)
    assert 4 <= begun <= 5


def test_memory_pressure_takes_from_the_tenant_that_holds_most():
    serving = Serving(num_blocks=40)
    small = serving.ask("small", num_prompt=5 * SIZE, max_tokens=100)
    serving.step()
    for _ in range(2):
        serving.ask("large", num_prompt=15 * SIZE, max_tokens=200)
    last = serving.ask("small", num_prompt=SIZE, max_tokens=100)
    serving.steps(120)
    assert small.ended
    assert last.ended
    assert {tenant for tenant, _ in serving.preempted} == {"large"}


@pytest.mark.parametrize(("priority", "gives_way"), [(1, False), (0, True), (-1, True)])
def test_only_what_is_at_least_as_important_gives_way(priority, gives_way):
    serving = flooded(Serving(policy="priority"))
    other = serving.ask("other", priority=priority)
    serving.steps(5)
    assert (other.first_token == 1) == gives_way
    assert sum(serving.preempted.values()) == gives_way


REQUEST = st.tuples(
    st.sampled_from("abcd"),
    st.integers(1, 100),  # prompt
    st.integers(1, 60),  # answer
    st.integers(1, 4),  # outputs
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), REQUEST), max_size=60))
def test_no_tenant_waits_long_with_nothing_running(arrivals):
    """Requests need a part of a tenant's blocks: a tenant with nothing running has its turn in the next
    step. Fairness takes no tenant's seats below its part, and each tenant's first sequence goes on."""
    serving = Serving(num_blocks=100, max_num_seqs=5, max_num_batched_tokens=40)
    for pause, (tenant, num_prompt, max_tokens, num_outputs) in arrivals:
        serving.ask(tenant, num_prompt, max_tokens, num_outputs)
        for _ in range(pause):
            fair_step(serving)
    for _ in range(20_000):
        if not serving.scheduler.running and not serving.scheduler.waiting:
            break
        fair_step(serving)
    assert all(one.ended for one in serving.requests.values())
    assert serving.memory.stats().in_use == 0


def fair_step(serving: Serving) -> None:
    scheduler = serving.scheduler
    tenants = {seq.tenant for seq in (*scheduler.running, *scheduler.waiting)}
    running = Counter(seq.tenant for seq in scheduler.running)
    firsts = {tenant: next(seq for seq in scheduler.running if seq.tenant == tenant) for tenant in running}
    plan = scheduler.schedule()
    gone = Counter(serving.sequences[one.seq_id].tenant for one in plan.preempted if one.reason == "fairness")
    lost = {one.seq_id for one in plan.preempted if one.reason == "fairness"}
    for tenant in gone:
        assert sum(seq.tenant == tenant for seq in scheduler.running) >= 1
        assert firsts[tenant].seq_id not in lost
    pressed = any(one.reason != "fairness" for one in plan.preempted)
    for tenant in tenants:
        now = sum(seq.tenant == tenant for seq in scheduler.running)
        assert now or pressed, f"{tenant} of {tenants} waits with nothing running; {running}"
    scheduler.schedule = lambda: plan
    try:
        serving.step()
    finally:
        del scheduler.schedule
    serving.memory.check()
