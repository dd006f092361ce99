"""A tiered memory whose moves are carried out on names instead of bytes, step by step, and everything that a
block, a slot or a sequence must hold is known by heart."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.offload.plan.tiered_offload import TieredOffload
from kvreclaim.offload.plan.transfers import Transfer, TransferOutcome

Content = tuple[Any, ...]
"""What a slot of a block holds: the salt, all tokens so far, and a name of what computed it, since each may
round otherwise; or, behind something lossy, a name of its own."""
HIT = "hit"
"""The name where any sequence may have computed it."""


@dataclass(eq=False)
class Live:
    """A sequence. tokens: all that are known; slots: what its physical slots hold."""

    tokens: list[int]
    salt: str | None
    slots: list[Any] = field(default_factory=list)
    exact: bool = True
    grown: int = 0


class TiersWorld:
    """Raises AssertionError for whatever holds something else than it should."""

    def __init__(self, num_blocks: int, size: int, **options: Any) -> None:
        self.now = 0.0
        offload = partial(TieredOffload, clock=lambda: self.now, **options)
        self.memory = MemoryManager(num_blocks, size, offload=offload)
        self.size = size
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.disk: dict[int, tuple[Any, Content]] = {}
        self.live: dict[int, Live] = {}
        self.parked: dict[int, Live] = {}
        self.waiting: dict[int, Live] = {}
        self.under_way: list[Transfer] = []
        self.copies: dict[int, tuple[tuple[int, int], ...]] = {}
        self.ids, self.names = count(1), count()
        self.num_hits = self.num_loads = self.num_back = 0

    # What a scheduler does.

    def ask(self, tokens: list[int], salt: str | None) -> None:
        """One waits; what the disk has of it is read ahead."""
        seq_id = next(self.ids)
        self.waiting[seq_id] = live = Live(list(tokens), salt)
        self.memory.offload.prefetch(seq_id, self.memory.keys(live.tokens, salt), len(tokens))

    def admit(self, number: int) -> None:
        """One that waits begins, if there is room."""
        if not self.waiting:
            return
        seq_id = list(self.waiting)[number % len(self.waiting)]
        if self.memory.offload.must_wait(seq_id):
            return
        live = self.waiting[seq_id]
        match = self.memory.match_prefix(self.memory.keys(live.tokens, live.salt))
        if not self.memory.can_admit(match, len(live.tokens) - len(match.entries) * self.size):
            return
        del self.waiting[seq_id]
        self.num_hits += len(match.entries)
        self.num_loads += len(match.lower)
        self.memory.admit(seq_id, match)
        live.slots = [self._token(live, p, HIT) for p in range(match.num_tokens)]
        self.live[seq_id] = live

    def grow(self, number: int, num_tokens: int) -> None:
        if not (seq_id := self._pick(number)):
            return
        live = self.live[seq_id]
        if live.grown or not self.memory.can_grow(seq_id, num_tokens):
            return
        self.copies[seq_id] = self.memory.grow(seq_id, num_tokens).copies
        live.grown = num_tokens

    def fork(self, number: int) -> None:
        """Between two steps."""
        self.step()
        if not (seq_id := self._pick(number)):
            return
        parent, child_id = self.live[seq_id], next(self.ids)
        child = Live(list(parent.tokens), parent.salt, list(parent.slots), parent.exact)
        self.memory.fork(seq_id, child_id, self.memory.table(seq_id).keys.fork(child.tokens))
        self.live[child_id] = child

    def free(self, number: int) -> None:
        self.step()
        if seq_id := self._pick(number):
            self.memory.free(seq_id)
            del self.live[seq_id]

    def evict(self, number: int, index: int) -> None:
        """A full block goes, and what comes later is not exact."""
        self.step()
        seq_id = self._pick(number)
        if not seq_id or not (full := len(self.live[seq_id].slots) // self.size):
            return
        live, index = self.live[seq_id], index % full
        self.memory.drop_blocks(seq_id, [index])
        del live.slots[index * self.size : (index + 1) * self.size]
        live.exact = False

    def park(self, number: int) -> None:
        """One gives way, maybe after it has grown: then that was in vain."""
        if not (seq_id := self._pick(number)):
            return
        before = self.memory.num_free
        if self.memory.offload.parking.park(seq_id):
            self.parked[seq_id] = live = self.live.pop(seq_id)
            self.copies.pop(seq_id, None)
            live.grown = 0
        else:
            assert self.memory.num_free == before

    def resume(self, number: int) -> None:
        if not self.parked:
            return
        seq_id = list(self.parked)[number % len(self.parked)]
        match = self.memory.offload.parking.match_parked(seq_id)
        if not self.memory.can_admit(
            match, self.memory.offload.parking.num_to_resume(seq_id, match) * self.size
        ):
            return
        self.memory.offload.parking.resume(seq_id, match)
        self.live[seq_id] = self.parked.pop(seq_id)
        self.num_back += 1

    def give_up(self, number: int) -> None:
        """One that waits, or is parked, is aborted."""
        self.step()
        gone = [*self.waiting, *self.parked]
        if not gone:
            return
        seq_id = gone[number % len(gone)]
        if self.waiting.pop(seq_id, None) is not None:
            self.memory.offload.end_loading(seq_id)
        else:
            del self.parked[seq_id]
            self.memory.offload.parking.drop_parked(seq_id)

    def reset(self) -> None:
        self.step()
        self.memory.reset_prefix_cache()
        if self.memory.offload.disk is not None and self.memory.offload.disk.take_reset():
            self.disk.clear()

    def finish_transfer(self, number: int, outcome: str) -> None:
        """One that is under way ends, in any order; a failed one leaves anything."""
        disk = self.memory.offload.disk
        if disk is None:
            return
        self.under_way += disk.take_transfers()
        if not self.under_way:
            return
        transfer = self.under_way.pop(number % len(self.under_way))
        found = TransferOutcome.OK if outcome == "ok" else TransferOutcome.FAILED
        if transfer.to_disk:
            if found is TransferOutcome.OK:
                self.disk[transfer.disk_slot] = transfer.name.uid, self.host[transfer.host_slot]
            else:
                self.disk.pop(transfer.disk_slot, None)
        else:
            there = self.disk.get(transfer.disk_slot)
            if found is TransferOutcome.OK and (there is None or there[0] != transfer.name.uid):
                found = TransferOutcome.GONE
            content = there[1] if found is TransferOutcome.OK and there is not None else ("noise",)
            self.host[transfer.host_slot] = content
        disk.finish(transfer.job_id, found)

    # What an engine does.

    def step(self, *, store_fails: bool = False) -> None:
        """Moves, tokens, and what they fill: in the engine's order."""
        memory = self.memory
        for block, slot in memory.offload.parking.pop_moves_out():
            self.host[slot] = self.device[block]
        moved = {block: self.host[slot] for slot, block in memory.offload.pop_moves_in()}
        self.device.update(moved)
        copies = [pair for pairs in self.copies.values() for pair in pairs]
        self.device.update({target: self.device[source] for source, target in copies})
        self.copies.clear()
        for seq_id, live in self.live.items():
            self._write(seq_id, live)
        for seq_id, live in self.live.items():
            memory.commit(seq_id, live.grown)
            live.grown = 0
        memory.release_copy_sources()
        stores = memory.offload.pop_stores()
        if store_fails:
            memory.offload.forget_slots([slot for _, slot in stores])
        else:
            self.host.update({slot: self.device[block] for block, slot in stores})
        memory.offload.stored()
        self.check()

    def _write(self, seq_id: int, live: Live) -> None:
        ids = self.memory.table(seq_id).block_ids
        for _ in range(live.grown):
            p = len(live.slots)
            if len(live.tokens) <= self.memory.table(seq_id).logical_len + live.grown:
                live.tokens.append(p % 2)
            name = next(self.names)
            value = self._token(live, p, name) if live.exact else ("own", name)
            block = ids[p // self.size]
            assert block is not None
            others = self.memory.pool.refs[block] - self.memory._held[block]  # sources of copies are held
            assert others == 1, f"block {block} is written and shared"
            self.device[block] = (*self.device.get(block, ())[: p % self.size], value)
            live.slots.append(value)

    def check(self) -> None:
        """Everybody has what is his, and the books are in order."""
        self.memory.check()
        for seq_id, live in self.live.items():
            table = self.memory.table(seq_id)
            assert table.physical_len == len(live.slots)
            for i, block in enumerate(table.block_ids[: blocks_for(len(live.slots), self.size)]):
                want = tuple(live.slots[i * self.size : (i + 1) * self.size])
                held = self.device[block][: len(want)]
                if any(each[-1] == HIT for each in want):
                    assert [each[:-1] for each in held] == [each[:-1] for each in want], f"{held}: not {want}"
                    live.slots[i * self.size : i * self.size + len(want)] = want = held
                assert held == want, f"sequence {seq_id}, block {i}: {held} instead of {want}"

    def finish(self) -> None:
        """All ends: nothing is left but what is cached."""
        self.step()
        for seq_id in list(self.live):
            self.memory.free(seq_id)
        for seq_id in list(self.parked):
            self.memory.offload.parking.drop_parked(seq_id)
        for seq_id in list(self.waiting):
            self.memory.offload.end_loading(seq_id)
        self.live.clear()
        self.parked.clear()
        self.waiting.clear()
        while self.memory.offload.disk is not None and (
            self.under_way or self.memory.offload.disk.num_storing
        ):
            self.finish_transfer(0, "ok")
        self.memory.check()
        assert self.memory.pool.num_in_use == 0
        assert self.memory.offload.host.pool.num_in_use == 0, "slots of the host are left"
        if self.memory.offload.disk is not None:
            assert self.memory.offload.disk.tier.pool.num_in_use == 0, "slots of the file are left"

    def _pick(self, number: int) -> int | None:
        return list(self.live)[number % len(self.live)] if self.live else None

    def _token(self, live: Live, position: int, name: Any) -> Any:
        return live.salt, tuple(live.tokens[: position + 1]), name
