"""One engine under a virtual clock: its own scheduler and memory, a cost model for the rest."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import replace
from math import sqrt

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.offload.plan.tiered_offload import TieredOffload
from kvreclaim.plan.cost import StepLoad, StepTime, keys_read, load_of
from kvreclaim.schedule import Footprint, Pass, StepDone, StepPlan
from kvreclaim.schedule.budget.footprint import excess_slots
from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.scheduler import Scheduler
from kvreclaim.sim.content import Links
from kvreclaim.sim.request import RequestRecord, SimRequest, Simulated
from kvreclaim.sim.settings import Settings


def leap_length(scheduler: Scheduler[Seq], *, blocked: bool, by_block: bool = False) -> int:
    """Return the number of next steps that only decode: up to the one after which a sequence ends or is
    compressed, and before one that lacks blocks. 0: none, or not known.

    by_block: stop where a sequence fills a block, because recurrent layers may keep a state there
    blocked:  the previous step admitted no sequence and no block has been freed since, so waiting sequences
              go on waiting, unless the queue order depends on the cache
    """
    memory, running = scheduler.memory, scheduler.running
    if len(scheduler.waiting) and (not blocked or scheduler.policy == "cache"):
        return 0
    if not 0 < len(running) <= scheduler.max_num_batched_tokens or memory.offload.num_slots:
        return 0
    most, size, held = 1 << 62, memory.block_size, []
    for seq in running:
        known = len(seq.token_ids)
        if known - seq.num_computed != 1 or seq.num_computed < seq.num_prompt or seq.is_due:
            return 0
        until = seq.footprint.tokens_until_pass(seq.num_computed, seq.num_prompt, seq.account)
        if seq.footprint.eviction_method.moves and memory.num_shared_of(seq.seq_id):
            until -= 1  # its pass takes blocks, and a sequence may be preempted for them
        table = memory.table(seq.seq_id)
        if by_block:
            most = min(most, size - table.physical_len % size)
        most = min(most, seq.max_len - known, until)
        if not memory.follows_itself(seq.seq_id):
            most = min(most, size - 1 - table.physical_len % size)
        held.append(len(table.block_ids) * size - table.physical_len)
    return _affordable(held, most, size, memory.num_free) if most > 1 else max(0, most)


def _affordable(room: list[int], most: int, size: int, num_free: int) -> int:
    """Return the number of steps, up to `most`, for which the free blocks suffice. room: free slots of each
    sequence."""

    def needed(steps: int) -> int:
        return sum(-(-(steps - left) // size) for left in room if steps > left)

    if len(room) * (most // size + 1) <= num_free or needed(most) <= num_free:
        return most
    return bisect_right(range(1, most), num_free, key=needed)


def leap(scheduler: Scheduler[Seq], num_steps: int) -> list[Seq]:
    """Take num_steps steps, leap_length at most. The caller appends as many tokens to each running sequence.

    Returns: these, in the order of the rows of each step.
    """
    memory, order = scheduler.memory, scheduler.in_turn()
    scheduler.num_steps += num_steps
    for seq in order:
        memory.grow(seq.seq_id, num_steps)
        memory.commit(seq.seq_id, num_steps, exact=seq.is_exact)
        seq.num_computed += num_steps
        seq.last_step = scheduler.num_steps
    memory.release_copy_sources()
    return order


SCATTER = 2654435761
"""Numbers of requests times this are spread evenly over all remainders."""
PAST_LIMIT = "the prompt leaves no token below max_model_len"
PAST_POOL = "the request takes more blocks than the pool has"


class Leap:
    """num_steps steps that begin at start_s, the first of which takes first_s, each other one more_s more."""

    __slots__ = ("first_s", "more_s", "num_steps", "start_s")

    def __init__(self, start_s: float, num_steps: int, first_s: float, more_s: float) -> None:
        self.start_s, self.num_steps, self.first_s, self.more_s = start_s, num_steps, first_s, more_s

    def end_s(self, num_steps: int) -> float:
        return self.start_s + (num_steps * self.first_s + self.more_s * (num_steps * (num_steps - 1) / 2))

    def cut(self, now: float) -> None:
        """End with the step in which now lies."""
        first, more, since = self.first_s, self.more_s, now - self.start_s
        if more > 0:
            half = first - more / 2
            guess = (sqrt(half * half + 2 * more * since) - half) / more
        else:
            guess = since / first if first > 0 else 1.0
        steps = min(self.num_steps, max(1, int(guess)))
        while steps > 1 and self.end_s(steps - 1) >= now:
            steps -= 1
        while steps < self.num_steps and self.end_s(steps) < now:
            steps += 1
        self.num_steps = steps


class Replica:
    """Steps as Engine.step takes them. A step's tokens are there at its end, its passes delay the next one.

    begin returns the end of the step, or of several at once; finish applies its results.

    running_steps: running sequences, summed up over steps; crowded_steps: in which some waited, with
    running_crowded of these sums
    """

    def __init__(self, number: int, settings: Settings, cost: StepTime, links: Links) -> None:
        self.number, self.settings, self.cost = number, settings, cost
        self.memory = settings.memory(links)
        below = self.memory.offload
        self._on_host = below.states if isinstance(below, TieredOffload) else None
        self.scheduler = settings.scheduler(self.memory)
        self.sequences: dict[int, Simulated] = {}
        self.inbox: deque[Simulated] = deque()
        self.num_steps = self.num_leaps = self.num_passes = 0
        self.running_steps = self.crowded_steps = self.running_crowded = 0
        self.tokens_evicted = self.blocks_moved = self.swaps = 0
        self.busy_s = 0.0
        self.preemptions: Counter[str] = Counter()
        self.version = 0
        self.leap: Leap | None = None
        self._plan: StepPlan | None = None
        self._delay_s = 0.0
        self._calm = False
        self._tails: Counter[Hashable] = Counter()
        self._num_alike = 0

    @property
    def is_busy(self) -> bool:
        return self.leap is not None or self._plan is not None

    def sequence(self, number: int, request: SimRequest, arrival_s: float) -> Simulated | str:
        """Return the request's sequence, or the reason why it can never run here."""
        settings, footprint = self.settings, self._footprint(number, request.num_prompt)
        prompt, blocks = request.num_prompt, settings.num_blocks
        longest = settings.max_model_len or 1 << 40
        limit = min(longest, prompt + request.num_output)
        if prompt >= longest:
            return PAST_LIMIT
        if excess_slots(prompt, limit, footprint, blocks) > 0:
            return PAST_POOL
        return Simulated(
            seq_id=number,
            request_id=str(number),
            token_ids=request.tokens(number),
            num_prompt=prompt,
            max_len=limit,
            first_id=number,
            footprint=footprint,
            priority=request.priority,
            request=request,
            record=RequestRecord(
                number, self.number, arrival_s, prompt, limit - prompt, session=request.session
            ),
        )

    def _footprint(self, number: int, num_prompt: int) -> Footprint:
        footprint = self.settings.footprint_of(num_prompt)
        choices = footprint.interval - footprint.block_size + 1
        if not self.settings.spread or choices < 2:
            return footprint
        return replace(footprint, offset=number * SCATTER % 2**32 % choices)

    def send(self, seq: Simulated) -> None:
        """Add a request to the next step."""
        self.inbox.append(seq)

    def begin(self, now: float) -> float | None:
        """Begin the next step, or several. Returns: its end; None without work."""
        while self.inbox:
            seq = self.inbox.popleft()
            self.sequences[seq.seq_id] = seq
            self.scheduler.add(seq)
            self._calm = False
            self._count_tail(seq, 1)
        if not self.sequences:
            return None
        start, self._delay_s = now + self._delay_s, 0.0
        if self.settings.leaps and not self._num_alike:
            steps = leap_length(self.scheduler, blocked=self._calm, by_block=self.settings.states is not None)
            if steps > 1:
                return self._begin_leap(start, steps)
        self._store_states()
        plan = self.scheduler.schedule()
        if plan.failed:
            raise plan.failed[0][1]
        if not (plan.rows or plan.preempted):
            raise InvalidArgumentError(
                f"request {next(iter(self.scheduler.waiting)).seq_id} fits into no empty pool of "
                f"{self.settings.num_blocks} blocks, but was let in; raise num_blocks."
            )
        self._plan = plan
        self._note_plan(plan, start)
        end = start + self.cost.step_s(load_of(plan.rows, self.sequences, self.memory))
        if moved := len(plan.swap_out) + len(plan.swap_in):
            self.blocks_moved += moved
            end += self.cost.move_s(moved)
        self.busy_s += end - now
        return end

    def _store_states(self) -> None:
        if self._on_host is not None:
            self._on_host.pop_stores()

    def _begin_leap(self, start: float, steps: int) -> float:
        running = self.scheduler.running
        keys, growing = 0, 0
        for seq in running:
            held = self.memory.table(seq.seq_id).physical_len + 1
            read = keys_read(seq, held)
            keys += read
            growing += keys_read(seq, held + 1) - read
        first = self.cost.step_s(StepLoad(len(running), len(running), keys, 0.0, len(running)))
        second = self.cost.step_s(StepLoad(len(running), len(running), keys + growing, 0.0, len(running)))
        self.leap = Leap(start, steps, first, second - first)
        return self.leap.end_s(steps)

    def _note_plan(self, plan: StepPlan, now: float) -> None:
        group = self.memory.recurrent
        for lost in plan.preempted:
            record = self.sequences[lost.seq_id].record
            record.preemptions += 1
            self.preemptions[lost.reason] += 1
            if lost.parked:
                record.swaps += 1
                self.swaps += 1
            if group is not None and group.leaving(lost.seq_id) is not None:
                group.saved(lost.seq_id)
        for begun in plan.admitted:
            if group is not None and group.coming(begun.seq_id) is not None:
                group.loaded(begun.seq_id)
            if self._on_host is not None and self._on_host.is_coming(begun.seq_id):
                self._on_host.loaded(begun.seq_id, self.memory.table(begun.seq_id))
            record = self.sequences[begun.seq_id].record
            if record.scheduled_s is None:
                record.scheduled_s = now
                record.hit_tokens, record.loaded_tokens = begun.num_hit, begun.num_loaded
        rows, settings = plan.rows, self.settings
        self._calm = (
            len(rows) == len(self.scheduler.running) < settings.max_num_batched_tokens
            and not (plan.admitted or plan.preempted or self.scheduler.in_flight.num_waiting)
            and all(row.num_tokens == 1 for row in rows)
        )

    def finish(self, now: float) -> list[Simulated]:
        """Finish the step, or the run of fast-forwarded steps. Returns: sequences that ended in it."""
        if self.leap is not None:
            return self._finish_leap(self.leap, now)
        plan, self._plan = self._plan, None
        assert plan is not None, f"replica {self.number} computes nothing"
        self.num_steps += 1
        rows = [(self.sequences[row.seq_id], row.num_tokens) for row in plan.rows]
        failed = self.scheduler.update_from_output(plan, StepDone(tuple(row.seq_id for row in plan.rows)))
        if failed:
            raise failed[0][1]
        self.blocks_moved += len(self.memory.offload.pop_stores())
        self.memory.offload.stored()
        self._store_states()
        ended = []
        for seq, num_tokens in rows:
            self._note_computed(seq, num_tokens)
            known = len(seq.token_ids)
            if seq.num_computed == known:
                seq.token_ids.append(0)
                if seq.record.first_token_s is None:
                    seq.record.first_token_s = now
                if known + 1 >= seq.max_len:
                    ended.append(seq)
        self._end(ended, now)
        computed = [seq for seq, _ in rows]
        if self.settings.evicts:
            self._compress(computed)
        self._count_running(1)
        return ended

    def _finish_leap(self, done: Leap, now: float) -> list[Simulated]:
        self.leap = None
        steps = done.num_steps
        running = leap(self.scheduler, steps)
        self._count_running(steps - 1)
        self.num_steps += steps
        self.num_leaps += 1
        self.busy_s += now - done.start_s
        ended, tokens = [], bytes(steps)
        for seq in running:
            self._note_computed(seq, steps)
            seq.token_ids.extend(tokens)
            if len(seq.token_ids) >= seq.max_len:
                ended.append(seq)
        self._end(ended, now)
        if self.settings.evicts:
            self._compress(running)
        self._count_running(1)
        return ended

    def _note_computed(self, seq: Simulated, num_tokens: int) -> None:
        held = self.memory.table(seq.seq_id).num_blocks
        record = seq.record
        if held > record.peak_blocks:
            record.peak_blocks = held
        if seq.num_computed <= seq.most_computed:
            record.recomputed_tokens += num_tokens
        else:
            first = seq.num_computed - num_tokens
            record.recomputed_tokens += max(0, seq.most_computed - first)
            seq.most_computed = seq.num_computed

    def _end(self, ended: list[Simulated], now: float) -> None:
        for seq in ended:
            seq.record.end_s = now
            seq.record.blocks_freed += seq.account.blocks_freed
            seq.record.passes += seq.account.compactions
            self.scheduler.remove(seq)
            del self.sequences[seq.seq_id]
            self._calm = False
            self._count_tail(seq, -1)

    def _count_running(self, num_steps: int) -> None:
        """Add steps to the counters."""
        self.running_steps += len(self.scheduler.running) * num_steps
        if len(self.scheduler.waiting):
            self.crowded_steps += num_steps
            self.running_crowded += len(self.scheduler.running) * num_steps

    def _count_tail(self, seq: Simulated, change: int) -> None:
        """Count sequences by tail. Two with one tail may find each other's blocks, so no step is skipped."""
        tail = seq.request.tail
        if tail is not None:
            self._num_alike -= self._tails[tail] > 1
            self._tails[tail] += change
            self._num_alike += self._tails[tail] > 1
            if not self._tails[tail]:
                del self._tails[tail]

    def _compress(self, computed: list[Simulated]) -> None:
        """Compress behind a step, as the engine does."""
        for done in self.scheduler.compress(computed):
            self._passed(done)

    def _passed(self, done: Pass[int]) -> None:
        self._calm = False
        self.num_passes += 1
        self.tokens_evicted += done.num_tokens - done.keep
        self._delay_s += self.cost.pass_s(done.num_tokens, done.keep)
