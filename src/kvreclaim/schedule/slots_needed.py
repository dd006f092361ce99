"""Slots that must be free before a sequence starts."""

from __future__ import annotations

from collections.abc import Iterable

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.kv_memory import KVMemory
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.schedule.sequence import ScheduledSequence


def own_slots(seq: ScheduledSequence, match: PrefixMatch, memory: KVMemory) -> int:
    """Slots that a sequence takes besides the blocks of its prefix match."""
    if memory.offload.parking.is_parked(seq.seq_id):
        return _slots_to_resume(seq, match, memory)
    known = len(seq.token_ids)
    slots = max(1, seq.footprint.slots_needed(seq.num_prompt, known) - match.num_tokens)
    if seq.footprint.windows:
        slots = blocks_for(slots, memory.block_size) * memory.block_size
        slots += seq.footprint.window_slots(known) - len(match.window_blocks) * memory.block_size
    first_pass = seq.footprint.first_pass(seq.num_prompt)
    if seq.footprint.eviction_method.moves and first_pass is not None and first_pass < known:
        # Its blocks become its own, while others keep the shared ones.
        slots += memory.num_shared(match) * memory.block_size
    return slots + len(match.lower) * memory.block_size + _slots_of_followers(seq, memory.block_size)


def _slots_of_followers(seq: ScheduledSequence, size: int) -> int:
    """Slots of the sequences that will fork from it: after the common tokens, or all if passes make blocks
    their own."""
    slots = 0
    for follower in seq.followers:
        known = len(follower.token_ids)
        slots += seq.footprint.window_slots(known)
        if _becomes_own(seq):
            slots += blocks_for(seq.footprint.slots_needed(seq.num_prompt, known), size) * size
        else:
            slots += (blocks_for(known, size) - seq.fork_at // size) * size
    return slots


def _becomes_own(seq: ScheduledSequence) -> bool:
    """Whether passes will copy blocks that it shares."""
    first_pass = seq.footprint.first_pass(seq.num_prompt)
    moves = seq.footprint.eviction_method.moves and seq.footprint.bounded
    return moves and first_pass is not None and first_pass < seq.max_len


def slots_of_fork(seq: ScheduledSequence, snapshot: ScheduledSequence, memory: KVMemory) -> int:
    """Slots of a fork of a snapshot: those after the shared blocks, with a copy of the last one, or all of
    them if a later pass makes blocks its own; and the snapshot's, if it has to be loaded first."""
    size, known, footprint = memory.block_size, len(seq.token_ids), seq.footprint
    parking, snapshot_id = memory.offload.parking, snapshot.seq_id
    parked = parking.parked(snapshot_id) if parking.is_parked(snapshot_id) else None
    table = memory.table(snapshot_id) if parked is None else parked.table
    blocks = memory.num_to_fork(table, known - snapshot.num_computed)
    if footprint.eviction_method.moves and footprint.bounded:
        blocks = max(blocks, blocks_for(footprint.slots_needed(seq.num_prompt, known), size))
    slots = blocks * size + footprint.window_slots(known)
    return slots if parked is None else slots + len(parked.held) * size


def _slots_to_resume(seq: ScheduledSequence, match: PrefixMatch, memory: KVMemory) -> int:
    """Slots of a parked sequence and its group: those held before, their next tokens, and certain growth."""
    size, parking, growth = memory.block_size, memory.offload.parking, 0
    for each in (seq, *seq.followers):
        length = parking.parked(each.seq_id).table.physical_len
        peak = length + (1 if seq.followers else seq.next_chunk)
        if each.footprint.bounded:
            peak = max(peak, min(each.max_len, each.footprint.decode_cap))
        growth += blocks_for(peak, size) - blocks_for(length, size)
    if _becomes_own(seq):
        for each in seq.followers:
            growth += len(parking.parked(each.seq_id).held)
        if not seq.account.compactions:
            growth += memory.num_shared(match) + parking.num_coming(seq.seq_id, match)
    others = [each.seq_id for each in seq.followers]
    return (parking.num_to_resume(seq.seq_id, match, others) + growth) * size


def _copied_at_first_pass(seq: ScheduledSequence, held: int, memory: KVMemory) -> int:
    """Blocks that its first pass takes at this size, because it writes no shared blocks."""
    if seq.account.compactions or not _becomes_own(seq):
        return 0
    kept = blocks_for(seq.footprint.kept(seq.footprint.decode_cap), memory.block_size)
    return max(0, kept - (held - memory.num_shared_of(seq.seq_id)))


def known_growth(running: Iterable[ScheduledSequence], memory: KVMemory, *, prompts: bool) -> int:
    """Slots that running sequences will certainly take: up to and including the next pass, after which blocks
    are freed. Admitting into them would only cause a preemption.

    prompts: include uncomputed prompts: with several tenants, not the last admission would be preempted for
             them
    """
    size, growth = memory.block_size, 0
    for seq in running:
        peak = min(seq.max_len, seq.footprint.decode_cap) if seq.footprint.bounded else 0
        if prompts and seq.is_prefill:
            peak = max(peak, seq.footprint.slots_needed(seq.num_prompt, len(seq.token_ids)))
        if peak:
            table = memory.table(seq.seq_id)
            held = len(table.block_ids)
            more = max(0, blocks_for(peak, size) - held)
            growth += (more + _copied_at_first_pass(seq, held + more, memory)) * size
            if seq.footprint.windows:
                chunk = None if seq.is_prefill else 1
                in_windows = memory.num_blocks(seq.seq_id) - table.num_blocks
                growth += max(0, seq.footprint.window_slots(peak, chunk) - in_windows * size)
    return growth
