"""Which sequences give way, and with which: the outputs of a request together."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest

from kvreclaim.memory import MemoryManager
from kvreclaim.offload.plan.tiered_offload import TieredOffload
from kvreclaim.schedule import ScheduledSequence, Scheduler
from kvreclaim.schedule.preemption_cost import LeastCost, PreemptionCostModel, choose_victims, victim_order
from kvreclaim.schedule.rates import Rates
from kvreclaim.schedule.state import StepPlanBuilder
from kvreclaim.schedule.step import StepDone

SIZE = 4
RATES = Rates(token_s=1.0, pass_s=0.0, out_s=1.0, in_s=1.0, call_s=0.0)


class Bench:
    """Requests that run, in host slots and blocks enough; a move of a block takes a second each way."""

    def __init__(self, mode="swap", num_blocks=400, num_host_slots=400, store_after=99):
        offload = partial(TieredOffload, num_host_slots=num_host_slots, store_after=store_after)
        self.memory = MemoryManager(num_blocks, SIZE, offload=offload)
        self.preemption = PreemptionCostModel(mode, bytes_per_block=1, rates=RATES)
        self.scheduler = Scheduler(
            self.memory,
            max_num_seqs=32,
            max_num_batched_tokens=4096,
            policy="fcfs",
            preemption=self.preemption,
        )
        self.ids = count()

    def ask(self, num_blocks, num_outputs=1, priority=0):
        """A request whose prompt fills blocks and half of another one; its outputs run, with a token each."""
        first = next(self.ids)
        prompt = [first] * (num_blocks * SIZE + SIZE // 2)
        seq = self._sequence(first, first, 0, prompt, priority)
        seq.seats = num_outputs
        self.scheduler.add(seq)
        self.step()
        seq.seats, outputs = 1, [seq]
        for index in range(1, num_outputs):
            child = self._sequence(next(self.ids), first, index, list(prompt), priority)
            assert self.scheduler.fork(seq, child)
            outputs.append(child)
        for one in outputs:
            one.token_ids.append(one.index)
        return outputs

    def _sequence(self, seq_id, first, index, tokens, priority):
        name = f"r{first}"
        return ScheduledSequence(
            seq_id, name, tokens, len(tokens), 10_000, index=index, first_id=first, priority=priority
        )

    def step(self):
        plan = self.scheduler.schedule()
        self.scheduler.update_from_output(plan, StepDone(tuple(row.seq_id for row in plan.rows)))
        self.memory.offload.pop_stores()
        return plan

    def chosen(self, policy, needy):
        order = victim_order(policy, by_priority=False, preemption=self.preemption, memory=self.memory)
        return [seq.seq_id for seq in choose_victims(order, self.scheduler.running, needy)]

    def preempt(self, group):
        step = StepPlanBuilder(0)
        self.scheduler.preemptor.preempt(group, group[0], "decode", step)
        return step.preempted, self.memory.offload.parking.pop_moves_out()


@pytest.mark.parametrize("policy", ["auto", "last", "priority", "lru", "cost"])
def test_single_outputs_give_way_alone(policy):
    bench = Bench()
    (needy,), *others = (bench.ask(2) for _ in range(3))
    for seq in bench.scheduler.running:
        seq.last_step = 1
    (chosen,) = bench.chosen(policy, needy)
    assert chosen == others[-1][0].seq_id


def test_who_came_last_takes_the_others_along():
    bench = Bench()
    (needy,), group = bench.ask(2), bench.ask(2, 3)
    (single,) = bench.ask(2)
    assert bench.chosen("last", needy) == [single.seq_id]
    bench.scheduler.remove(single)
    assert bench.chosen("last", needy) == [seq.seq_id for seq in group]


def test_those_of_the_needy_ones_request_go_one_by_one():
    bench = Bench()
    group = bench.ask(2, 3)
    for policy in ("last", "priority", "lru", "cost"):
        assert bench.chosen(policy, group[0]) == [group[2].seq_id]


def test_the_least_important_go_together():
    bench = Bench()
    group, (single,) = bench.ask(2, 3, priority=1), bench.ask(2)
    assert bench.chosen("priority", single) == [seq.seq_id for seq in group]


def test_a_group_is_as_recent_as_the_last_one_that_computed():
    bench = Bench()
    group, (single,), (needy,) = bench.ask(2, 3), bench.ask(2), bench.ask(2)
    for recent, last_step in zip(group, (5, 1, 1), strict=True):
        recent.last_step = last_step
    single.last_step, needy.last_step = 3, 9
    assert bench.chosen("lru", needy) == [single.seq_id]
    group[0].last_step = 2
    assert bench.chosen("lru", needy) == [seq.seq_id for seq in group]


@pytest.mark.parametrize(("num_blocks", "dearer"), [(13, False), (15, True)])
def test_a_group_costs_what_its_sequences_do_and_what_they_share_once(num_blocks, dearer):
    """Four outputs over ten blocks and a begun one, which three have copied: 14 blocks, out and in."""
    bench = Bench()
    group, (needy,) = bench.ask(10, 4), bench.ask(30)
    bench.step()
    (single,) = bench.ask(num_blocks - 1)
    cost = LeastCost(bench.preemption, bench.memory)
    assert cost(group, 0) == (-28.0, 0)
    assert cost([single], 1) == (-2.0 * num_blocks, 1)
    expected = group if dearer else [single]
    assert bench.chosen("cost", needy) == [seq.seq_id for seq in expected]


def test_a_group_that_is_computed_again_finds_its_first_ones_blocks():
    bench = Bench("recompute")
    group = bench.ask(10, 3)
    assert LeastCost(bench.preemption, bench.memory)(group, 0) == (-(42.0 + 2 + 2), 0)
    for seq in group:
        bench.memory.mark_inexact(seq.seq_id)
    assert LeastCost(bench.preemption, bench.memory)(group, 0) == (-3 * 42.0, 0)


def test_four_outputs_over_64_blocks_are_parked_in_64_slots_and_their_tails():
    bench = Bench()
    group = bench.ask(64, 4)
    bench.step()  # three of them copy the begun block
    lost, outs = bench.preempt(group)
    assert [(one.seq_id, one.parked) for one in lost] == [(seq.seq_id, True) for seq in reversed(group)]
    assert len(outs) == len(set(outs)) == bench.memory.offload.parking.num_parked_slots == 64 + 4
    assert bench.memory.offload.host.pool.num_in_use == 64 + 4
    assert bench.memory.pool.num_in_use == 0
    bench.memory.check()
    assert [seq.seq_id for seq in bench.scheduler.waiting] == [seq.seq_id for seq in group]
    for seq in group:
        bench.scheduler.remove(seq)
        bench.memory.check()
    assert (
        bench.memory.offload.host.pool.num_in_use
        == bench.memory.offload.parking.num_parked_slots
        == bench.memory.offload.parking.num_parked
        == 0
    )


@pytest.mark.parametrize("exact", [True, False])
def test_those_that_come_back_together_share_again(exact):
    bench = Bench()
    group = bench.ask(64, 4)
    if not exact:
        for seq in group:
            bench.memory.mark_inexact(seq.seq_id)
    bench.step()
    bench.preempt(group)
    blocks = bench.memory.pool.allocate(400)  # nothing of it is left
    bench.memory.pool.release(blocks)
    plan = bench.step()
    assert [one.resumed for one in plan.admitted] == [True] * 4
    assert len(plan.swap_in) == bench.memory.pool.num_in_use == 64 + 4
    bench.memory.check()


def test_exact_ones_that_come_back_later_share_what_is_there():
    bench = Bench(num_blocks=100)
    group = bench.ask(64, 4)
    bench.step()
    bench.preempt(group)
    bench.scheduler.max_num_seqs = bench.scheduler._state.max_num_seqs = 1
    bench.memory.pool.release(bench.memory.pool.allocate(100))
    assert len(bench.step().swap_in) == 65
    bench.scheduler.max_num_seqs = bench.scheduler._state.max_num_seqs = 4
    assert len(bench.step().swap_in) == 3
    assert bench.memory.pool.num_in_use == 64 + 4
    bench.memory.check()


def test_who_finds_no_slots_is_computed_again_and_the_others_are_parked():
    bench = Bench(num_host_slots=66)
    group = bench.ask(64, 4)
    bench.step()
    lost, outs = bench.preempt(group)
    assert [one.parked for one in lost] == [True, True, False, False]
    assert len(outs) == bench.memory.offload.parking.num_parked_slots == 66
    bench.memory.check()


def test_who_ends_before_it_is_moved_is_not_moved():
    """Its slots may be another sequence's by then."""
    bench = Bench(num_host_slots=12)
    first, second = bench.ask(6, 2), bench.ask(6)
    bench.step()
    step = StepPlanBuilder(0)
    bench.scheduler.preemptor.preempt(first, first[0], "decode", step)
    bench.scheduler.remove(first[1])
    assert bench.memory.offload.parking.num_parked_slots == 7
    bench.scheduler.remove(first[0])
    bench.scheduler.preemptor.preempt(second, second[0], "decode", step)
    outs = bench.memory.offload.parking.pop_moves_out()
    assert len({slot for _, slot in outs}) == len(outs) == 7
    bench.memory.check()
