"""Tables of sliding windows: what is held, hit, kept and reused first."""

from __future__ import annotations

import random

import pytest

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.groups.window import TURN_TOKENS
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.windows import ChunkedWindow, Window

SIZE = 2


def make(num_blocks: int = 400, *windows: Window, size: int = SIZE, **others) -> MemoryManager:
    return MemoryManager(num_blocks, size, windows=windows or (Window(5, 1),), **others)


def run(
    memory: MemoryManager, seq_id: int, tokens: list[int], *, chunk: int = 3, known: int | None = None
) -> int:
    """Compute all of a sequence's tokens; the first `known` are its prompt. Returns: tokens hit."""
    memory_tokens = list(tokens[: known or len(tokens)])
    keys = memory.keys(memory_tokens)
    match = memory.match_prefix(keys)
    memory.admit(seq_id, match)
    done = match.num_tokens
    memory_tokens += tokens[len(memory_tokens) :]
    while done < len(tokens):
        step = min(chunk, len(tokens) - done)
        assert memory.can_grow(seq_id, step)
        memory.grow(seq_id, step)
        memory.commit(seq_id, step)
        memory.release_copy_sources()
        memory.check()
        done += step
    return match.num_tokens


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_a_sequence_holds_what_its_window_needs(window, chunk):
    memory = make(400, Window(window, 3))
    run(memory, 0, list(range(57)), chunk=chunk)
    table = memory.windows[0].table(0)
    assert table.first == max(0, 57 - window + 1) // SIZE
    assert len(table.rows) <= blocks_for(window - 1, SIZE) + 1
    assert memory.num_blocks(0) == blocks_for(57, SIZE) + 3 * len(table.rows)
    assert memory.windows[0].window.most_blocks(57, 1, SIZE) == 3 * (blocks_for(window - 1, SIZE) + 1)
    memory.free(0)
    memory.check()
    assert memory.num_free == 400


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("step", [1, 3, 20])
def test_a_sequence_holds_its_last_chunk(size, step):
    memory = make(400, ChunkedWindow(size, 3))
    assert [ChunkedWindow(8).first_seen(position) for position in (13, 8, 7)] == [8, 8, 0]
    run(memory, 0, list(range(61)), chunk=step)
    table = memory.windows[0].table(0)
    assert table.first == 61 // size * size // SIZE
    assert len(table.rows) == blocks_for(61 % size, SIZE)
    memory.free(0)
    memory.check()
    assert memory.num_free == 400


@pytest.mark.parametrize(
    ("num_tokens", "cached", "expected"),
    [
        (20, [0, 0, 0, 0, 0, 0, 0, 0, 1], 18),
        (20, [1, 1, 1, 1, 1, 1, 1, 1, 0], 16),
        (20, [0, 0, 0, 0, 0, 0, 0, 0, 0], 16),
        (17, [0, 0, 0, 0, 0, 0, 0, 0], 16),
        (15, [0, 0, 0, 0, 1, 0, 1], 10),
        (15, [1, 1, 1, 1, 0, 1, 1], 8),
        (15, [0, 0, 0, 0, 1, 1, 1], 14),
        (7, [0, 1, 1], 0),
        (7, [1, 1, 0], 4),
    ],
)
def test_hits_within_chunks(num_tokens, cached, expected):
    """S = 2, chunks of 8: blocks from the chunk's start on are needed, and none before."""
    memory, tokens = make(400, ChunkedWindow(8)), list(range(num_tokens))
    run(memory, 0, tokens, chunk=num_tokens)
    entries = memory.table(0).entries
    for i, keep in enumerate(cached):
        if not keep:
            memory.pool.unindex(memory.pool.rows.find((entries[i].serial, 0))[0])
    assert memory.match_prefix(memory.keys(tokens)).num_tokens == expected


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
@pytest.mark.parametrize("length", [1, 7, 40])
@pytest.mark.parametrize("window", [Window(6, 2), ChunkedWindow(8, 2)])
def test_most_blocks_is_reached_and_never_passed(chunk, length, window):
    most = 0
    memory = make(400, window)
    keys = memory.keys(list(range(length)))
    memory.admit(0, memory.match_prefix(keys))
    for start in range(0, length, chunk):
        step = min(chunk, length - start)
        memory.grow(0, step)
        most = max(most, memory.num_blocks(0) - memory.table(0).num_blocks)
        memory.commit(0, step)
        memory.release_copy_sources()
    bound = window.most_blocks(length, chunk, SIZE)
    assert most <= bound
    if length == 40 and chunk == 1:
        assert most == bound


@pytest.mark.parametrize(
    ("cached", "num_full", "expected"),
    [
        ([0, 0, 0, 0, 1, 1], 6, 12),
        ([0, 0, 1, 1, 0, 1], 6, 8),
        ([1, 0, 0, 0, 1, 0], 6, 2),
        ([0, 0, 1, 1, 0, 0], 6, 8),
        ([0, 0, 0, 0, 1, 1], 4, 0),
        ([0, 0, 1, 1, 0, 0], 4, 8),
    ],
)
def test_hits_are_a_fixed_point(cached, num_full, expected):
    """S = 2, W = 5, 13 tokens; which blocks the window's layers have, and how many the full ones."""
    memory = make()
    tokens = list(range(13))
    run(memory, 0, tokens, chunk=13)  # one chunk: every row has been entered
    entries = memory.table(0).entries
    for i, keep in enumerate(cached):
        if not keep:
            memory.pool.unindex(memory.pool.rows.find((entries[i].serial, 0))[0])
    for entry in entries[num_full:]:
        memory.pool.unindex(entry.block)
    assert memory.match_prefix(memory.keys(tokens)).num_tokens == expected


def test_two_windows_agree_on_one_length():
    memory = make(400, Window(5, 1), Window(3, 2))
    tokens = list(range(21))
    run(memory, 0, tokens, chunk=21)
    entries = memory.table(0).entries
    assert memory.match_prefix(memory.keys(tokens)).num_tokens == 20
    memory.pool.unindex(memory.pool.rows.find((entries[9].serial, 1))[0])
    assert memory.match_prefix(memory.keys(tokens)).num_tokens == 18
    memory.pool.unindex(memory.pool.rows.find((entries[7].serial, 0))[0])
    match = memory.match_prefix(memory.keys(tokens))
    assert match.num_tokens == 14
    assert match.miss == "window"
    assert [len(rows) for rows in match.windows] == [2, 1]


def test_a_hit_is_shared_and_what_is_written_behind_it_is_not():
    memory = make()
    run(memory, 0, list(range(13)))
    assert run(memory, 1, [*range(12), 99, 98, 97]) == 12
    first, second = memory.windows[0].table(0), memory.windows[0].table(1)
    assert first.rows[-1] != second.rows[-1]
    memory.check()


def test_a_fork_copies_the_begun_blocks_of_every_table():
    memory = make(60, Window(5, 2))
    run(memory, 0, list(range(13)))
    keys = memory.table(0).keys.fork([*range(13)])
    memory.fork(0, 1, keys)
    memory.check()
    growth = memory.grow(1, 1)
    assert len(growth.copies) == 3  # the full layers' block and two of the window's
    memory.check()
    memory.release_copy_sources()
    assert memory.grow(0, 1).copies == ()


def test_a_leaving_window_goes_before_what_is_cached():
    """The blocks of a long prompt's windows are reused again and again; no other prompt's go for them."""
    memory = make(40)
    run(memory, 0, list(range(13)))
    memory.free(0)
    cached = memory.match_prefix(memory.keys(list(range(13)))).num_tokens
    assert cached == 12
    run(memory, 1, list(range(100, 140)), chunk=2)
    assert memory.match_prefix(memory.keys(list(range(13)))).num_tokens == 12
    memory.check()


@pytest.mark.parametrize("order", ["lru", "slru", "priority"])
def test_turns_end_where_they_can_be_gone_on_behind(order):
    """Both where the prompt ends and where the answer does."""
    memory = make(300, eviction_policy=order)
    talk = list(range(61))
    run(memory, 0, talk, chunk=1, known=31)
    memory.free(0)
    run(memory, 1, list(range(1000, 1150)), chunk=10)
    assert memory.match_prefix(memory.keys([*talk, 7, 8])).num_tokens == 60
    assert memory.match_prefix(memory.keys([*talk[:31], 7, 8])).num_tokens == 30


def test_an_earlier_turns_tail_is_kept_only_if_the_next_is_far():
    memory = make(4000, Window(5, 1), size=8)
    far = list(range(TURN_TOKENS + 100))
    run(memory, 0, far[:41], chunk=8)
    memory.free(0)
    run(memory, 1, far, chunk=64)
    assert memory.windows[0].table(1).tails == ((TURN_TOKENS + 99) // 8, 5)
    near = [*far[:41], *range(9000, 9040)]
    run(memory, 2, near, chunk=64)
    assert memory.windows[0].table(2).tails == (10,)


def test_any_order_of_operations_holds_together():
    """A random walk: check() after every operation, and hits that hold what their tokens say."""
    rng = random.Random(3)
    memory = make(90, Window(7, 2), Window(4, 1))
    written: dict[int, tuple[int, int]] = {}  # block of a window -> (window, hash of its prefix)
    live: dict[int, list[int]] = {}
    num_hit = 0
    for seq_id in range(400):
        what = rng.random()
        if live and what < 0.3:
            memory.free(victim := rng.choice(list(live)))
            del live[victim]
        elif live and what < 0.45:
            parent = rng.choice(list(live))
            live[seq_id] = live[parent].copy()
            memory.fork(parent, seq_id, memory.table(parent).keys.fork(live[seq_id]))
        else:
            tokens = [int(rng.random() < 0.1) for _ in range(rng.randrange(1, 24))]
            keys = memory.keys(tokens)
            match = memory.match_prefix(keys)
            if memory.can_admit(match, len(tokens) + 40):
                for n, rows in enumerate(match.windows):
                    for i, row in enumerate(rows, len(match.entries) - len(rows)):
                        key = (n, hash(tuple(tokens[: (i + 1) * SIZE])))
                        assert all(written[block] == key for block in row), "a hit holds another text"
                        num_hit += 1
                memory.admit(seq_id, match)
                live[seq_id] = tokens
        for seq_id_, tokens in list(live.items()):
            done = memory.table(seq_id_).logical_len
            if done == len(tokens):
                tokens += [rng.randrange(2) for _ in range(rng.randrange(3))]
            step = min(rng.randrange(1, 9), len(tokens) - done)
            if step and memory.can_grow(seq_id_, step):
                memory.grow(seq_id_, step)
                memory.release_copy_sources()
                for n, group in enumerate(memory.windows):
                    table = group.table(seq_id_)
                    for i in range(done // SIZE, (done + step) // SIZE):
                        for block in table.rows[i - table.first]:
                            assert memory.pool.refs[block] == 1, f"block {block} is written and shared"
                            written[block] = n, hash(tuple(tokens[: (i + 1) * SIZE]))
                memory.commit(seq_id_, step, exact=rng.random() < 0.98)
                memory.check()
        memory.check()
    assert memory.pool.num_evictions > 50
    assert num_hit > 50
    for seq_id in list(live):
        memory.free(seq_id)
    memory.reset_prefix_cache()
    memory.check()
    assert memory.num_free == 90
    assert memory.stats().cached == 0
