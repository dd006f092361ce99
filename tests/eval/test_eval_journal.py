"""A journal survives kills, belongs to one run at a time, and never hands out results of other cells."""

from __future__ import annotations

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.journal import JOURNAL, Journal, cell_key
from kvreclaim.eval.results import Result

ABOUT = {"policy": "knorm", "fraction": 0.25}
KEY = cell_key(ABOUT)


def result(points: float = 1.0) -> Result:
    return Result(
        points=points,
        out_of=3,
        found=(0.25, 1 / 3),
        lost=(0.5,),
        extra={"kl": 0.1},
        num_tokens=100,
        budget=25,
        full_blocks=7,
        answer_blocks=3,
        peak_blocks=4,
        blocks_freed=3,
        blocks_perfect=3,
        tokens_evicted=60,
        compactions=1,
        preemptions=0,
        timed_tokens=100,
        elapsed_s=0.5,
        generated=False,
    )


def test_what_was_appended_is_there_again(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append(KEY, ABOUT, [(0, result(1)), (1, result(2))])
        journal.append(KEY, ABOUT, [(5, result(3))])
    with Journal(tmp_path) as journal:
        assert journal.of(KEY) == {0: result(1), 1: result(2), 5: result(3)}
        assert journal.of(cell_key({**ABOUT, "fraction": 0.5})) == {}
    assert (tmp_path / JOURNAL).read_text().count('"about"') == 1


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_cut_by_a_kill_is_dropped_and_the_next_one_is_whole(tmp_path, cut):
    with Journal(tmp_path) as journal:
        journal.append(KEY, ABOUT, [(0, result(1)), (1, result(2))])
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(tmp_path) as journal:
        assert journal.of(KEY) == {0: result(1)}
        journal.append(KEY, ABOUT, [(2, result(3))])
    with Journal(tmp_path) as journal:
        assert journal.of(KEY) == {0: result(1), 2: result(3)}


def test_two_runs_cannot_share_a_journal(tmp_path):
    pytest.importorskip("fcntl")
    with Journal(tmp_path), pytest.raises(InvalidArgumentError, match="in use by another run"):
        Journal(tmp_path)
    Journal(tmp_path).close()


@pytest.mark.parametrize("line", ["{}", "no json", '{"cell":"a","index":0,"result":{"points":1}}'])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, line):
    path = tmp_path / JOURNAL
    path.write_text(line + "\n")
    with pytest.raises(InvalidArgumentError, match="no journal of this version"):
        Journal(tmp_path)
    assert path.read_text() == line + "\n"


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="--out"):
        Journal(tmp_path / "file" / "below")
