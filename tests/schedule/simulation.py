"""The scheduler over real memory with a worker made of plain lists: fit to be fuzzed, and without torch.

The worker keeps, for every slot of every block, which token's state was written there last, and for every
sequence which states it has to find. A block given back too early, written while shared, hit although it was
computed over an evicted context or with numbers that are none, copied twice or from a block that belongs
to another sequence by then shows as a wrong state.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from kvreclaim.memory import MemoryManager
from kvreclaim.memory.prefix.index import BlockName
from kvreclaim.offload.plan.disk import DiskTier
from kvreclaim.offload.plan.tiered_offload import TieredOffload
from kvreclaim.offload.plan.transfers import Transfer, TransferOutcome
from kvreclaim.schedule.budget.compaction import Pass
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.preemption_cost import PreemptionCostModel
from kvreclaim.schedule.scheduler import Scheduler
from kvreclaim.schedule.sequence import ScheduledSequence, Status
from kvreclaim.schedule.step import Row as StepRow
from kvreclaim.schedule.step import StepDone, StepPlan

State = tuple[Any, ...]
GARBAGE: State = ("garbage",)
MOST_STEPS_TO_DRAIN = 5000


def disk_of(memory: MemoryManager) -> DiskTier | None:
    return memory.offload.disk if isinstance(memory.offload, TieredOffload) else None


@dataclass
class Row:
    """A sequence inside the worker: the states in its slots, None where none is read; the slots still
    attended."""

    states: list[State | None] = field(default_factory=list)
    live: list[int] = field(default_factory=list)

    def copy(self) -> Row:
        return Row(list(self.states), list(self.live))


class ListWorker:
    """Does what plans say: copy, forget what fresh blocks hold, write, move; then everything is read."""

    def __init__(self, memory: MemoryManager, random: Random) -> None:
        self.memory = memory
        self.size = memory.block_size
        self.random = random
        self.slots: list[State] = [GARBAGE] * (memory.pool.num_blocks * self.size)
        self.rows: dict[int, Row] = {}
        self.aside: dict[int, Row] = {}
        self.taken_over = 0
        self.transfers: list[Transfer] = []
        self.file: dict[int, tuple[BlockName, list[State]]] = {}
        num_slots = memory.offload.num_slots
        self.host: list[list[State]] = [[GARBAGE] * self.size for _ in range(num_slots)]

    def prepare(self, plan: StepPlan, sequences: dict[int, ScheduledSequence]) -> None:
        """The part of a plan that is done once, whatever becomes of the rest."""
        for lost in plan.preempted:
            row = self.rows.pop(lost.seq_id)
            if lost.parked:
                self.aside[lost.seq_id] = row
        for block, slot in plan.swap_out:
            self.host[slot] = self.block(block)
        assert len({block for _, block in plan.swap_in}) == len(plan.swap_in), "a block is loaded twice"
        for slot, block in plan.swap_in:
            self.fill(block, self.host[slot])
        sources = [self.block(source) for source, _ in plan.copies]
        assert not {s for s, _ in plan.copies} & {t for _, t in plan.copies}
        for (_, target), states in zip(plan.copies, sources, strict=True):
            self.fill(target, states)
        for block in plan.fresh:
            self.fill(block, [GARBAGE] * self.size)
        for one in plan.admitted:
            if one.resumed:
                self.rows[one.seq_id] = self.aside.pop(one.seq_id)
            elif one.seq_id in sequences:
                states = [full(sequences[one.seq_id], place) for place in range(one.num_hit)]
                self.rows[one.seq_id] = Row(list(states), list(range(one.num_hit)))
            if one.seq_id in sequences:
                self.check(one.seq_id)
        for row in plan.rows:
            found, seq = self.rows[row.seq_id], sequences[row.seq_id]
            if len(found.states) == len(found.live) < row.first and not seq.account.num_evicted:
                states = [full(seq, place) for place in range(len(found.states), row.first)]
                self.taken_over += len(states)
                self.committed(row.seq_id, states)
                self.check(row.seq_id)

    def transfer(self) -> None:
        """Some of what is on its way between host and disk arrives, in any order, or does not."""
        disk = disk_of(self.memory)
        if disk is None:
            return
        for transfer in disk.take_transfers():
            self.transfers.append(transfer)
            if not transfer.to_disk:
                self.host[transfer.host_slot] = [GARBAGE] * self.size
        for transfer in self.random.sample(
            self.transfers, self.random.randrange(min(6, len(self.transfers) + 1))
        ):
            self.transfers.remove(transfer)
            outcome = TransferOutcome.FAILED if self.random.random() < 0.05 else TransferOutcome.OK
            if transfer.to_disk:
                good = outcome is TransferOutcome.OK and self.random.random() < 0.7
                written = self.host[transfer.host_slot] if good else [GARBAGE] * self.size
                self.file[transfer.disk_slot] = transfer.name, written
            elif outcome is TransferOutcome.OK:
                name, states = self.file[transfer.disk_slot]
                if name == transfer.name and GARBAGE not in states:
                    self.host[transfer.host_slot] = states
                else:
                    outcome = TransferOutcome.GONE
            disk.finish(transfer.job_id, outcome)

    def store(self) -> None:
        """What has become full goes to its slots; now and then that fails."""
        if not self.memory.offload.num_slots:
            return
        moves = self.memory.offload.pop_stores()
        if self.random.random() < 0.05:
            self.memory.offload.forget_slots([slot for _, slot in moves])
        else:
            for block, slot in moves:
                self.host[slot] = self.block(block)
        self.memory.offload.stored()

    def write(
        self, seq: ScheduledSequence, first: int, num_tokens: int, *, finite: bool = True
    ) -> list[State]:
        """Compute tokens into their slots; their states are the sequence's own once they are committed."""
        assert seq.num_computed == first
        table = self.memory.table(seq.seq_id)
        row = self.rows[seq.seq_id]
        assert table.physical_len == len(row.states)
        states = []
        for place in range(first, first + num_tokens):
            exact = len(row.live) == first and not seq.footprint.reads_sparsely(place, seq.num_prompt)
            exact = exact and all(state is not None and state[0] == "full" for state in row.states)
            states.append(full(seq, place) if exact else ("own", seq.seq_id, place, self.random.random()))
            if not finite:
                states[-1] = ("not finite",)
            slot = len(row.states) + place - first
            block = table.block_ids[slot // self.size]
            assert block is not None
            holders = sum(block in self.memory.table(seq_id).block_ids for seq_id in self.rows)
            assert holders == 1, f"block {block}, of {holders}, is written"
            assert block not in self.memory.pool.index, f"block {block} can be hit"
            self.slots[block * self.size + slot % self.size] = states[-1]
        return states

    def committed(self, seq_id: int, states: list[State]) -> None:
        row = self.rows[seq_id]
        row.live += range(len(row.states), len(row.states) + len(states))
        row.states += states

    def choose(self, done: Pass[int], seq: ScheduledSequence) -> tuple[list[int], int] | None:
        """Carry out a pass. Returns: the table's entries that go, and prompt slots left, if nothing moves."""
        row = self.rows[done.seq_id]
        assert done.num_tokens == len(row.live)
        assert done.keep == seq.num_computed - seq.account.num_evicted
        if done.eviction_method is EvictionMethod.BLOCKS:
            full_blocks = range(len(row.states) // self.size)
            count = (done.num_tokens - done.keep) // self.size
            gone = sorted(self.random.sample(full_blocks, count))
            row.states = [s for slot, s in enumerate(row.states) if slot // self.size not in gone]
            row.live = list(range(len(row.states)))
            return gone, 0
        kept = sorted(self.random.sample(row.live, done.keep))
        found = [self.slots[self.slot(done.source_ids, slot)] for slot in range(len(row.states))]
        assert found == row.states, f"sequence {done.seq_id} moves {found}, not {row.states}"
        row.states = [row.states[slot] for slot in kept]
        row.live = list(range(done.keep))
        for place in range(len(done.target_ids) * self.size):
            self.slots[self.slot(done.target_ids, place)] = (
                row.states[place] or GARBAGE if place < done.keep else GARBAGE
            )
        return None

    def check(self, seq_id: int) -> None:
        """Every slot of a sequence holds the state that it must find there."""
        row, table = self.rows[seq_id], self.memory.table(seq_id)
        assert table.physical_len == len(row.states)
        for slot, state in enumerate(row.states):
            block = table.block_ids[slot // self.size]
            if state is not None:
                assert block is not None
                found = self.slots[block * self.size + slot % self.size]
                assert found == state, f"sequence {seq_id} finds {found} in slot {slot}, not {state}"

    def slot(self, block_ids: tuple[int, ...], place: int) -> int:
        return block_ids[place // self.size] * self.size + place % self.size

    def block(self, block: int) -> list[State]:
        return self.slots[block * self.size : (block + 1) * self.size]

    def fill(self, block: int, states: list[State]) -> None:
        self.slots[block * self.size : (block + 1) * self.size] = states


def full(seq: ScheduledSequence, place: int) -> State:
    """Return the state of a token computed over its whole context under its salt, which names it."""
    return ("full", seq.cache_salt, hash(tuple(seq.token_ids[: place + 1])))


@dataclass
class Ask:
    """A request: its sequences to come, and what is to happen to it."""

    prompt: list[int]
    num_outputs: int
    max_len: int
    footprint: Footprint
    priority: int
    salt: str | None
    tenant: str | None = None
    guilty: bool = False


class World:
    """A scheduler and its worker, step by step, with the whole structure checked after each."""

    def __init__(
        self,
        random: Random,
        scheduler: type[Scheduler[ScheduledSequence]] = Scheduler,
        num_host_slots: int | None = 0,
        policies: tuple[str, ...] = ("fcfs", "priority", "cache"),
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.random = random
        self.size = random.choice((1, 2, 4))
        self.max_chunk = random.choice((3, 8, 20))
        self.num_blocks = random.choice((6, 12, 24, 40))
        orders = ("lru", "slru", "priority")
        self.memory = self._memory(
            enable_prefix_caching=random.random() < 0.9,
            eviction_policy=random.choice(orders),
            num_host_slots=0 if num_host_slots == 0 else random.choice((1, 5, 20, 100)),
        )
        self.max_num_seqs = random.choice((1, 3, 6))
        self.policy = random.choice(policies)
        self.scheduler: Scheduler[ScheduledSequence] = scheduler(
            self.memory,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_chunk,
            policy=self.policy,
            **self._preemption(num_host_slots),
        )
        self.scheduler.in_flight.least_tokens = random.choice((1, 1, 3, 64))
        self.worker = ListWorker(self.memory, random)
        self.sequences: dict[int, ScheduledSequence] = {}
        self.requests: dict[str, Ask] = {}
        self.waits_for_fork: dict[str, bool] = {}
        self.plans: list[StepPlan] = []
        self.next_id = 0

    def _memory(self, num_host_slots: int, **options: Any) -> MemoryManager:
        if not num_host_slots:
            return MemoryManager(self.num_blocks, self.size, **options)
        wait = self.random.choice((0, 3, 50))
        offload = partial(
            TieredOffload,
            num_host_slots=num_host_slots,
            max_parked=self.random.choice((None, num_host_slots // 2)),
            host_eviction_policy=self.random.choice(("lru", "slru", "priority")),
            store_after=self.random.choice((1, 1, 2)),
            store_decoded=self.random.random() < 0.8,
            num_disk_slots=self.random.choice((0, 0, 3, 30, 200)),
            disk_store_after=self.random.choice((1, 1, 2)),
            load_wait_s=lambda _: wait,
            races=wait == 0 and self.random.random() < 0.5,
            clock=lambda: self.counts["steps"],
        )
        return MemoryManager(self.num_blocks, self.size, offload=offload, **options)

    def _preemption(self, num_host_slots: int | None) -> dict[str, Any]:
        if num_host_slots == 0:
            return {}
        mode = self.random.choice(("auto", "swap", "swap", "recompute"))
        policy = self.random.choice(("auto", "last", "priority", "lru", "cost"))
        return {"preemption": PreemptionCostModel(mode, bytes_per_block=1000), "preemption_victim": policy}

    def ask(self, ask: Ask) -> bool:
        """Queue a request. Returns: whether it can ever run."""
        capacity = self.num_blocks * self.size
        needed = ask.footprint.slots_needed(len(ask.prompt), ask.max_len)
        if needed > capacity or ask.num_outputs > self.max_num_seqs or len(ask.prompt) >= ask.max_len:
            return False
        name = f"r{len(self.requests)}"
        self.requests[name] = ask
        self.waits_for_fork[name] = ask.num_outputs > 1
        seq = self._sequence(name, 0, list(ask.prompt), self.next_id)
        seq.seats = ask.num_outputs
        self.scheduler.add(seq)
        self.counts["requests"] += 1
        return True

    def _sequence(self, name: str, index: int, tokens: list[int], first_id: int) -> ScheduledSequence:
        ask = self.requests[name]
        seq = ScheduledSequence(
            seq_id=self.next_id,
            request_id=name,
            token_ids=tokens,
            num_prompt=len(ask.prompt),
            max_len=ask.max_len,
            index=index,
            first_id=first_id,
            footprint=ask.footprint,
            priority=ask.priority if self.policy != "fcfs" else 0,
            cache_salt=ask.salt,
            tenant=ask.tenant,
        )
        self.sequences[seq.seq_id] = seq
        self.next_id += 1
        return seq

    def abort(self, name: str) -> None:
        for seq in [seq for seq in self.sequences.values() if seq.request_id == name]:
            self.end(seq)

    def end(self, seq: ScheduledSequence) -> None:
        self.scheduler.remove(seq)
        self.sequences.pop(seq.seq_id)
        self.worker.rows.pop(seq.seq_id, None)
        self.worker.aside.pop(seq.seq_id, None)
        assert seq.status is Status.ENDED

    def step(self, fault: str | None = None) -> None:
        """fault: None, "raise" (the pass fails half-way and each row is tried alone), or "nan"."""
        self.worker.transfer()
        plan = self.scheduler.schedule()
        self._check_plan(plan)
        self.plans.append(plan)
        self.counts["steps"] += 1
        self.counts["preemptions"] += len(plan.preempted)
        self.counts["fairness"] += sum(lost.reason == "fairness" for lost in plan.preempted)
        self.counts["parked"] += sum(lost.parked for lost in plan.preempted)
        self.counts["resumed"] += sum(one.resumed for one in plan.admitted)
        self.counts["loaded"] += sum(one.num_loaded for one in plan.admitted)
        self.counts["hits"] += sum(one.num_hit for one in plan.admitted)
        self.counts["copies"] += len(plan.copies)
        self.worker.prepare(plan, self.sequences)
        computed = self._compute(plan, fault)
        tokens = {row.seq_id: self._drawn(row) for row in plan.rows if row.seq_id in computed}
        assert not self.scheduler.update_from_output(plan, StepDone(tuple(computed), tokens))
        self.worker.store()
        for seq_id, states in computed.items():
            self.worker.committed(seq_id, states)
        failed = {self.sequences[row.seq_id].request_id for row in plan.rows if row.seq_id not in computed}
        for name in failed:
            self.abort(name)
        left = [self.sequences[seq_id] for seq_id in computed if seq_id in self.sequences]
        self._compress([seq for seq in left if seq.is_to_fork])
        for seq_id in list(computed):
            if seq_id in self.sequences:
                self._draw(self.sequences[seq_id], drawn=bool(tokens[seq_id]))
        self._compress([self.sequences[row.seq_id] for row in plan.rows if row.seq_id in self.sequences])
        self.check()

    def _check_plan(self, plan: StepPlan) -> None:
        assert not plan.failed, plan.failed
        assert sum(row.num_tokens for row in plan.rows) <= self.max_chunk
        waits = (disk := disk_of(self.memory)) is not None and disk.num_loading
        assert plan.rows or waits or not (self.scheduler.running or self.scheduler.waiting), "nothing runs"
        assert len({row.seq_id for row in plan.rows}) == len(plan.rows)
        targets = [target for _, target in plan.copies]
        assert len({*plan.fresh, *targets}) == len(plan.fresh) + len(targets), "a block is given to two"

    def _compute(self, plan: StepPlan, fault: str | None) -> dict[int, list[State]]:
        """The states of those whose tokens were computed and are numbers."""
        rows = [(self.sequences[row.seq_id], row) for row in plan.rows]
        guilty = {seq.seq_id for seq, _ in rows if self.requests[seq.request_id].guilty}
        if (fault == "raise" or guilty) and rows:
            self.counts["failed passes"] += 1
            for seq, row in rows[: self.random.randrange(len(rows) + 1)]:
                self.worker.write(seq, row.first, row.num_tokens, finite=False)
            if len(rows) == 1:
                return {}
        poisoned = {rows[self.random.randrange(len(rows))][0].seq_id} if fault == "nan" and rows else set()
        computed = {}
        for seq, row in rows:
            if seq.seq_id in guilty:
                continue
            finite = seq.seq_id not in poisoned
            states = self.worker.write(seq, row.first, row.num_tokens, finite=finite)
            if finite:
                computed[seq.seq_id] = states
        return computed

    def _drawn(self, row: StepRow) -> tuple[int, ...]:
        """Return what the scheduler is to append: the next token, where all tokens will be computed
        and nothing forks."""
        seq = self.sequences[row.seq_id]
        knows_all = row.first + row.num_tokens == len(seq.token_ids)
        if not knows_all or self.waits_for_fork[seq.request_id] or self.random.random() < 0.5:
            return ()
        return (self._token(seq),)

    def _draw(self, seq: ScheduledSequence, *, drawn: bool) -> None:
        if seq.num_computed < len(seq.token_ids):
            if drawn:
                self._end_if_long(seq)
            return
        outputs = [seq]
        if self.waits_for_fork[seq.request_id]:
            self.waits_for_fork[seq.request_id] = False
            seq.seats = 1
            for index in range(1, self.requests[seq.request_id].num_outputs):
                child = self._sequence(seq.request_id, index, list(seq.token_ids), seq.first_id)
                if self.scheduler.fork(seq, child):
                    self.worker.rows[child.seq_id] = self.worker.rows[seq.seq_id].copy()
                else:
                    self.counts["forks that wait"] += 1
                outputs.append(child)
        for one in outputs:
            one.token_ids.append(self._token(one))
            self._end_if_long(one)

    def _token(self, seq: ScheduledSequence) -> int:
        """Outputs of one prompt often agree for a while, so that contents meet."""
        return Random(f"{seq.token_ids} {seq.index % 2}").randrange(3)

    def _end_if_long(self, seq: ScheduledSequence) -> None:
        if len(seq.token_ids) >= seq.max_len:
            self.end(seq)

    def _compress(self, sequences: list[ScheduledSequence]) -> None:
        passes = self.scheduler.compress(sequences)
        self.counts["passes"] += len(passes)
        for done in passes:
            found = self.worker.choose(done, self.sequences[done.seq_id])
            if found is not None:
                self.scheduler.compressed(done, *found)

    def check(self) -> None:
        self.memory.check()
        for seq in self.scheduler.running:
            self.worker.check(seq.seq_id)
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert {seq.seq_id for seq in (*running, *waiting)} == self.sequences.keys()
        assert len(running) <= self.max_num_seqs
        for tenant in {seq.tenant for seq in running}:
            assert sum(seq.seats for seq in running if seq.tenant == tenant) <= self.max_num_seqs
        assert self.worker.rows.keys() == {seq.seq_id for seq in running}
        is_parked = self.memory.offload.parking.is_parked
        assert self.worker.aside.keys() == {seq.seq_id for seq in waiting if is_parked(seq.seq_id)}

    def drain(self) -> None:
        for _ in range(MOST_STEPS_TO_DRAIN):
            if not self.sequences:
                break
            self.step()
        assert not self.sequences, "some sequences never end"
        assert self.memory.stats().in_use == 0
        self.counts["waits"] += self.scheduler.in_flight.num_waits
        if isinstance(offload := self.memory.offload, TieredOffload):
            disk = offload.disk
            while disk is not None and (disk.num_storing or self.worker.transfers):
                self.worker.transfer()
            self.memory.check()
            assert offload.host.pool.num_in_use == 0, "slots are still referenced"
            if disk is not None:
                assert disk.tier.pool.num_in_use == 0, "slots of the file are still referenced"
                self.counts["from disk"] += disk.num_loaded
                self.counts["taken over"] += self.worker.taken_over
                self.counts["gone"] += disk.num_gone
