"""Several steps at once, if all running sequences decode one token in each and nothing else happens.

Exact: counts, lengths, blocks and what can be hit afterwards are those of the single steps.
"""

from __future__ import annotations

from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.scheduler import Scheduler


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
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= num_free else (low, middle)
    return low


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
