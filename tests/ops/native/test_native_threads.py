"""Loops without cores for their threads: the same numbers, torch out of the way, children of forks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvreclaim.ops.extension import native, torch_alone


@pytest.fixture
def no_cores() -> Iterator[None]:
    native().lack_cores(True)
    yield
    native().lack_cores(False)


def product(x: Tensor, w: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], w.shape[0])
    native().linear(x, w, None, out)
    return out


@pytest.fixture(scope="module")
def factors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 512, generator=generator), torch.randn(3000, 512, generator=generator)


def test_without_cores_a_product_is_the_same_to_the_bit(
    threads: int, factors: tuple[Tensor, Tensor], request: pytest.FixtureRequest
) -> None:
    expected = product(*factors)
    request.getfixturevalue("no_cores")
    assert native().lacks_cores()
    for _ in range(50):
        assert torch.equal(product(*factors), expected)


def test_python_threads_share_the_pool(factors: tuple[Tensor, Tensor], no_cores: None) -> None:
    expected, wrong = product(*factors), []

    def work() -> None:
        torch.set_num_threads(2)
        wrong.extend(i for i in range(100) if not torch.equal(product(*factors), expected))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_child_has_threads_of_its_own(factors: tuple[Tensor, Tensor], no_cores: None) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    expected = product(*factors).numpy()
    x, w = factors
    out = torch.empty(5, 3000)
    child = os.fork()
    if child == 0:
        native().linear(x, w, None, out)
        os._exit(0 if (out.numpy() == expected).all() else 1)
    torch.set_num_threads(before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_torch_works_alone_and_kernels_do_not(threads: int, no_cores: None) -> None:
    with torch_alone():
        assert torch.get_num_threads() == 1
        assert native().max_threads() == threads
    assert torch.get_num_threads() == native().max_threads() == threads


def test_torch_keeps_its_threads_while_there_are_cores(threads: int) -> None:
    native().lack_cores(False)
    with torch_alone():
        assert torch.get_num_threads() == threads
