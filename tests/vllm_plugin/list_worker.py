"""A worker made of plain lists, for simulation.py.

It keeps, for every slot of every block, which token's state was written there last, and for every request
which states it has to find. A block given back too early, written while shared, hit although its content was
computed over an evicted context, or read through a wrong row shows as a wrong state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

State = tuple[Any, ...]


@dataclass
class Row:
    """A request inside the worker: its blocks, how far it is, the states that it must find in its slots."""

    block_ids: list[int]
    num_computed: int
    shift: int = 0
    states: list[State] = field(default_factory=list)


class ListWorker:
    """Executes steps as a model runner does: forget, compress, take blocks, write, then read everything."""

    def __init__(self, num_blocks: int, block_size: int, random: Random, group: int = 0) -> None:
        self.size = block_size
        self.group = group
        self.random = random
        self.cells: list[State] = [()] * (num_blocks * block_size)
        self.rows: dict[str, Row] = {}
        self.tokens: dict[str, list[int]] = {}
        self.chains: dict[str, list[int]] = {}
        self.kept: dict[int, tuple[list[State], list[int]]] = {}

    def execute(self, output: Any) -> ModelRunnerOutput:
        cached = output.scheduled_cached_reqs
        fresh = [data.req_id for data in output.scheduled_new_reqs]
        news = getattr(output, "kvreclaim_snapshots", None)
        for number, num_tokens, request_id in news.kept if news else ():
            row = self.rows[request_id]
            states = row.states[: num_tokens - row.shift]
            self.kept[number] = states, self.tokens[request_id][:num_tokens]
        gone = (*output.finished_req_ids, *(output.preempted_req_ids or ()), *fresh, *cached.resumed_req_ids)
        for request_id in gone:
            self.rows.pop(request_id, None)
        message = getattr(output, "kvreclaim", None)
        for done in message.passes if message else ():
            self.compress(done)
        for block_id in output.new_block_ids_to_zero or ():
            self.fill(block_id, ("zero",))
        for data in output.scheduled_new_reqs:
            self.rows[data.req_id] = Row(list(data.block_ids[self.group]), data.num_computed_tokens)
        for request_id, new, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self.rows[request_id] = Row(list(new[self.group]), computed)
            elif new is not None:
                self.rows[request_id].block_ids.extend(new[self.group])
            assert self.rows[request_id].num_computed == computed
        for request_id in (*fresh, *cached.resumed_req_ids):
            row = self.rows[request_id]
            row.states = [self.full_state(request_id, place) for place in range(row.num_computed)]
        for begun in news.begun if news else ():
            self.begin(begun)
        for number in news.dropped if news else ():
            del self.kept[number]
        for request_id, count in output.num_scheduled_tokens.items():
            self.compute(request_id, count)
        for request_id, row in self.rows.items():
            self.check(request_id, row)
        return self.sample(output)

    def compress(self, done: Any) -> None:
        row = self.rows[done.seq_id]
        assert row.block_ids == list(done.source_ids), "the scheduler and the worker differ in the row"
        assert (len(row.states), row.num_computed) == (done.num_tokens, done.logical_len)
        assert done.first == (row.shift == 0)
        self.check(done.seq_id, row)
        kept = sorted(self.random.sample(range(done.num_tokens), done.keep))
        row.states = [row.states[place] for place in kept]
        row.block_ids = list(done.target_ids)
        row.shift += done.num_tokens - done.keep
        assert row.shift == done.shift
        assert len(row.block_ids) == -(-done.keep // self.size)
        for place in range(len(row.block_ids) * self.size):
            self.cells[self.slot(row, place)] = row.states[place] if place < done.keep else ("tail",)

    def begin(self, begun: Any) -> None:
        """The snapshot's states, which the request finds in its blocks."""
        row, (states, tokens) = self.rows[begun.request_id], self.kept[begun.number]
        assert self.tokens[begun.request_id][: begun.num_tokens] == tokens
        assert (row.num_computed, len(states)) == (begun.num_tokens, begun.num_tokens - begun.shift)
        row.states, row.shift = list(states), begun.shift
        self.check(begun.request_id, row)

    def compute(self, request_id: str, count: int) -> None:
        row = self.rows[request_id]
        for place in range(row.num_computed, row.num_computed + count):
            own = ("own", request_id, place, self.random.random())
            row.states.append(own if row.shift else self.full_state(request_id, place))
            self.cells[self.slot(row, place - row.shift)] = row.states[-1]
        row.num_computed += count
        assert len(row.block_ids) == -(-len(row.states) // self.size), "blocks to spare, or too few"

    def check(self, request_id: str, row: Row) -> None:
        for place in range(0, len(row.states), self.size):
            expected = row.states[place : place + self.size]
            slot = self.slot(row, place)
            found = self.cells[slot : slot + len(expected)]
            assert found == expected, f"{request_id} finds {found} from {place} on, not {expected}"

    def sample(self, output: Any) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in ids:
            tokens = self.tokens[request_id]
            done = self.rows[request_id].num_computed >= len(tokens)
            sampled.append([Random(f"{request_id} {len(tokens)}").randrange(2, 500)] if done else [])
            tokens.extend(sampled[-1])
        return ModelRunnerOutput(ids, {name: row for row, name in enumerate(ids)}, sampled)

    def full_state(self, request_id: str, place: int) -> State:
        """State of a token computed over its whole context, which names it."""
        chain = self.chains.setdefault(request_id, [0])
        while len(chain) < place + 2:
            chain.append(hash((chain[-1], self.tokens[request_id][len(chain) - 1])))
        return ("full", place, chain[place + 1])

    def is_exact(self, block_id: int) -> bool:
        """Whether all of a block was computed over a full context."""
        states = self.cells[block_id * self.size : (block_id + 1) * self.size]
        return all(state[0] == "full" for state in states)

    def fill(self, block_id: int, state: State) -> None:
        self.cells[block_id * self.size : (block_id + 1) * self.size] = [state] * self.size

    def slot(self, row: Row, place: int) -> int:
        return row.block_ids[place // self.size] * self.size + place % self.size


class GroupWorker(ListWorker):
    """A worker whose requests have tables in other groups as well."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.others: dict[str, dict[int, list[int]]] = {}
        self.history: dict[str, list[State]] = {}

    def execute(self, output: Any) -> ModelRunnerOutput:
        cached = output.scheduled_cached_reqs
        begun = {data.req_id: data.block_ids for data in output.scheduled_new_reqs}
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                begun[request_id] = new
            elif new is not None:
                for group, table in self.others[request_id].items():
                    table.extend(new[group])
        for request_id, tables in begun.items():
            self.history.pop(request_id, None)
            self.others[request_id] = {
                group: list(ids) for group, ids in enumerate(tables) if group != self.group
            }
        return super().execute(output)

    def compute(self, request_id: str, count: int) -> None:
        """Compute as usual; another group sees what it would see without compression."""
        row = self.rows[request_id]
        history = self.history.setdefault(request_id, list(row.states))
        start = row.num_computed
        super().compute(request_id, count)
        history += row.states[len(row.states) - count :]
        self.look_back(request_id, history, start)

    def look_back(self, request_id: str, history: list[State], start: int) -> None:
        """Read and write what the other groups hold of the tokens so far; those from start on are new."""
        raise NotImplementedError


class WindowWorker(GroupWorker):
    """Groups of sliding windows, with states of their own."""

    WINDOW = 50

    def look_back(self, request_id: str, history: list[State], start: int) -> None:
        for group, table in self.others[request_id].items():
            for place in range(max(0, start - self.WINDOW + 1), len(history)):
                slot = table[place // self.size] * self.size + place % self.size
                own = (*history[place], group)
                if place >= start:
                    self.cells[slot] = own
                assert self.cells[slot] == own, f"{request_id} finds {self.cells[slot]}, not {own}"


class StateWorker(GroupWorker):
    """Groups of recurrent state: a block holds one, of all tokens up to where a step has ended.

    reach: tokens for which vLLM has one block
    sums:  of each request its history, and what has become of the state after each token of it
    """

    reach: int

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sums: dict[str, tuple[list[State], list[State]]] = {}

    def look_back(self, request_id: str, history: list[State], start: int) -> None:
        known, sums = self.sums.get(request_id, ([], []))
        if known is not history:
            sums = [("full", 0)]
            self.sums[request_id] = history, sums
        for state in history[len(sums) - 1 :]:
            kind = "full" if sums[-1][0] == state[0] == "full" else "own"
            sums.append((kind, hash((sums[-1], state))))
        for group, table in self.others[request_id].items():
            if start:
                found = self.cells[table[(start - 1) // self.reach] * self.size]
                own = (*sums[start], group)
                assert found == own, f"{request_id} finds {found}, not {own}"
            self.fill(table[(len(history) - 1) // self.reach], (*sums[-1], group))
