"""A scheduler that serves requests of several tenants, without a model: it counts tokens alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvreclaim.memory import MemoryManager
from kvreclaim.schedule import ScheduledSequence, Scheduler, StepDone, StepPlan

SIZE = 16


@dataclass
class ServedRequest:
    """A request. first_token: steps from its arrival to its first token, that one included."""

    name: str
    tenant: str | None
    num_prompt: int
    num_outputs: int
    arrived: int
    first_token: int | None = None
    sequences: list[ScheduledSequence] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return all(len(seq.token_ids) >= seq.max_len for seq in self.sequences)


class Serving:
    """rows: of the last step, in tokens by tenant; computed: of all, by request. preempted: of all, by
    (tenant, reason); begun: names, in this order."""

    def __init__(
        self,
        num_blocks: int = 100_000,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        policy: str = "fcfs",
        **options: Any,
    ) -> None:
        self.memory = MemoryManager(num_blocks, SIZE, **options)
        self.scheduler: Scheduler[ScheduledSequence] = Scheduler(
            self.memory,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
        )
        self.requests: dict[str, ServedRequest] = {}
        self.sequences: dict[int, ScheduledSequence] = {}
        self.rows: Counter[str | None] = Counter()
        self.computed: Counter[str] = Counter()
        self.begun: list[str] = []
        self.preempted: Counter[tuple[str | None, str]] = Counter()
        self.num_steps = 0
        self._ids = count()

    def ask(
        self,
        tenant: str | None,
        num_prompt: int = 10,
        max_tokens: int = 4000,
        num_outputs: int = 1,
        priority: int = 0,
        prompt: list[int] | None = None,
        **others: Any,
    ) -> ServedRequest:
        """Add a request. prompt: else tokens of no other request; others: fields of the sequence"""
        name = f"{tenant}-{len(self.requests)}"
        prompt = list(prompt or [1000 + len(self.requests)] * num_prompt)
        num_prompt = len(prompt)
        request = self.requests[name] = ServedRequest(name, tenant, num_prompt, num_outputs, self.num_steps)
        seq = self._sequence(request, prompt, num_prompt + max_tokens, priority, **others)
        seq.seats = num_outputs
        self.scheduler.add(seq)
        return request

    def _sequence(
        self, request: ServedRequest, tokens: list[int], max_len: int, priority: int, **others: Any
    ) -> ScheduledSequence:
        seq_id = next(self._ids)
        first_id = request.sequences[0].seq_id if request.sequences else seq_id
        seq = ScheduledSequence(
            seq_id,
            request.name,
            tokens,
            request.num_prompt,
            max_len,
            len(request.sequences),
            first_id,
            priority=priority,
            tenant=request.tenant,
            **others,
        )
        request.sequences.append(seq)
        self.sequences[seq_id] = seq
        return seq

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert not plan.failed
        self.num_steps += 1
        self.rows = Counter()
        for row in plan.rows:
            self.rows[self.sequences[row.seq_id].tenant] += row.num_tokens
            self.computed[self.sequences[row.seq_id].request_id] += row.num_tokens
        self.begun += [self.sequences[one.seq_id].request_id for one in plan.admitted]
        self.preempted.update((self.sequences[one.seq_id].tenant, one.reason) for one in plan.preempted)
        assert not self.scheduler.update_from_output(plan, StepDone(tuple(row.seq_id for row in plan.rows)))
        for row in plan.rows:
            self._draw(self.sequences[row.seq_id])
        return plan

    def _draw(self, seq: ScheduledSequence) -> None:
        if seq.num_uncomputed:
            return
        request = self.requests[seq.request_id]
        outputs = [seq]
        if seq.seats > 1:
            seq.seats = 1
            for _ in range(1, request.num_outputs):
                child = self._sequence(request, list(seq.token_ids), seq.max_len, seq.priority)
                self.scheduler.fork(seq, child)
                outputs.append(child)
        for one in outputs:
            one.token_ids.append(one.index)
            if len(one.token_ids) >= one.max_len:
                self.scheduler.remove(one)
        if request.first_token is None:
            request.first_token = self.num_steps - request.arrived

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def num_running(self, tenant: str | None) -> int:
        return sum(seq.tenant == tenant for seq in self.scheduler.running)

    def num_waiting(self, tenant: str | None) -> int:
        return sum(seq.tenant == tenant for seq in self.scheduler.waiting)

    def held(self, tenant: str | None) -> int:
        """Blocks, each counted once."""
        tables = (self.memory.table(seq.seq_id) for seq in self.scheduler.running if seq.tenant == tenant)
        return len({block for table in tables for block in table.blocks()})
