"""The number of threads: the option's, torch's, or the hardware's where a trial finds these faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvreclaim import LLM, InvalidArgumentError, demo_model
from kvreclaim.ops import threads


@pytest.fixture(autouse=True)
def _restored(monkeypatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    threads.fastest.cache_clear()
    yield
    threads.fastest.cache_clear()
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch):
    """torch's threads, those of the hardware, and the seconds that the trial finds -> the threads chosen."""

    def choose(own: int, usable: int, seconds: dict[int, float]) -> int:
        torch.set_num_threads(own)
        monkeypatch.setattr(threads, "_usable", lambda: range(usable))
        monkeypatch.setattr(threads, "_trial", lambda counts: {count: seconds[count] for count in counts})
        threads.use_threads(0)
        return torch.get_num_threads()

    return choose


@pytest.mark.parametrize(
    ("own", "usable", "seconds", "chosen"),
    [
        (1, 2, {1: 1.8, 2: 1.0}, 2),
        (1, 2, {1: 1.0, 2: 0.98}, 1),
        (1, 2, {1: 1.0, 2: 1.5}, 1),
        (2, 2, {}, 2),
        (2, 1, {}, 2),
    ],
    ids=["faster", "as fast", "slower", "all are cores", "bound to fewer"],
)
def test_two_threads_to_a_core_only_where_that_is_faster(machine, own, usable, seconds, chosen) -> None:
    if threads.KERNELS is None:
        pytest.skip("without kernels nothing is tried")
    assert machine(own, usable, seconds) == chosen


def test_the_variable_is_obeyed_without_a_trial(machine, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine(1, 2, {}) == 1


def test_the_trial_runs_and_leaves_torchs_number(monkeypatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(threads, "_usable", lambda: range(2))
    assert threads.fastest() in (1, 2)
    assert torch.get_num_threads() == 1


def test_an_engine_runs_on_the_given_threads() -> None:
    torch.set_num_threads(1)
    llm = LLM(demo_model(), num_blocks=8)
    assert torch.get_num_threads() == 1
    with LLM(demo_model(), num_blocks=8, threads=2) as other:
        assert torch.get_num_threads() == 2
        with pytest.raises(InvalidArgumentError, match="threads is 1, and the weights were loaded with 2"):
            other.sibling(threads=1)
    with pytest.raises(InvalidArgumentError, match="threads"):
        LLM(demo_model(), num_blocks=8, threads=-1)
    llm.close()
