"""Blocks that requests share, as the page shows them."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.engine.serving.pool_view import who_shares
from kvreclaim.page.sharing import MAX_ROWS, SharedRun, _tree

SYSTEM, *TAILS = tiny.prompts((96, 40, 33, 20), seed=8)
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def runs(*rows: list[int], owners: list[int] | None = None) -> list[tuple]:
    given = zip(rows, owners or range(len(rows)), strict=True)
    pairs = sorted(((np.array(row, np.int32), owner) for row, owner in given), key=lambda p: p[0].tobytes())
    found = _tree([row for row, _ in pairs], [owner for _, owner in pairs])
    return [(one.level, one.num_blocks, one.requests, one.num_sequences) for one in found]


def test_trees_by_hand() -> None:
    assert runs() == runs([1, 2]) == runs([1], [2], [3]) == []
    assert runs([1, 2], [1, 2]) == [(0, 2, (0, 1), 2)]
    assert runs([5, 6], [5, 6], owners=[3, 3]) == [(0, 2, (3,), 2)]
    assert runs([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [1, 2], [7, 8]) == [
        (0, 2, (0, 1, 2, 3), 4),
        (1, 1, (0, 1), 2),
        (2, 1, (0,), 1),
        (2, 1, (1,), 1),
        (1, 1, (2,), 1),
    ]


def test_blocks_counted_over_the_tree_are_those_held() -> None:
    """Random rows: each level adds up, and the spared blocks are those that tables name more than once."""
    random = np.random.default_rng(2)
    for _ in range(50):
        texts = random.integers(0, 10**6, (3, 9))
        rows = []
        for number in range(random.integers(2, 9)):
            own = 10**7 + 100 * number + np.arange(random.integers(0, 4))
            rows.append([*texts[random.integers(3)][: random.integers(1, 10)].tolist(), *own.tolist()])
        found = runs(*rows)
        spared = sum(blocks * (count - 1) for _, blocks, _, count in found)
        assert spared == sum(map(len, rows)) - len({block for row in rows for block in row})


@pytest.fixture
def busy(make_llm):
    """Three requests of one beginning, and one of another, all decoding."""
    llm = make_llm()
    for number, tail in enumerate(TAILS):
        llm.engine.add_request(f"r{number}", SYSTEM + tail, PARAMS)
    llm.engine.add_request("other", tiny.prompts((50,), seed=77)[0], PARAMS)
    for _ in range(3):
        llm.engine.step()
    return llm


def test_one_beginning_of_three_requests(busy) -> None:
    sharing = who_shares(busy.engine)
    assert sharing.runs[0] == SharedRun(0, 6, (0, 2, 3), 3)  # in the order of admission: "other" did not wait
    assert sharing.num_spared == 12
    assert {run.num_sequences for run in sharing.runs[1:]} == {1}


def test_afterwards_nothing_is_shared(busy) -> None:
    while busy.engine.has_unfinished:
        busy.engine.step()
    assert who_shares(busy.engine).runs == ()


def test_outputs_of_a_request_count_as_sequences(make_llm) -> None:
    llm = make_llm()
    params = SamplingParams(temperature=1.0, max_tokens=30, n=3, ignore_eos=True, seed=1)
    llm.engine.add_request("many", SYSTEM, params)
    for _ in range(20):
        llm.engine.step()
    (first, *_) = who_shares(llm.engine).runs
    assert (first.num_blocks, first.requests, first.num_sequences) == (6, (0,), 3)


def test_what_is_compressed_shares_nothing(make_llm) -> None:
    llm = make_llm()
    compression = llm.compressor(CompressionConfig("knorm", budget=32, interval=16, sinks=2, recent=4))
    for number, tail in enumerate(TAILS):
        llm.engine.add_request(f"r{number}", SYSTEM + tail, PARAMS, compression)
    for _ in range(4):
        llm.engine.step()
    assert len(llm.engine.scheduler.running) == 3
    assert who_shares(llm.engine).runs == ()


def test_the_page_gets_no_more_rows_than_it_draws(make_llm) -> None:
    llm = make_llm(max_num_seqs=64, num_blocks=1000)
    for number in range(MAX_ROWS + 5):
        llm.engine.add_request(f"r{number}", [*SYSTEM, *[number % 60 + 1] * 20], PARAMS)
    for _ in range(3):
        llm.engine.step()
    sharing = who_shares(llm.engine)
    assert len(sharing.runs) == MAX_ROWS
    assert sharing.num_spared >= 6 * (MAX_ROWS + 4)
