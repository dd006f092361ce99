"""CUDA graphs in each of vLLM's modes, over its V1 runner: requests of every kind, compressed and not, answer
as transformers does with the same tokens dropped, and a step without compressed requests is vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engine
from models import random_prompts
from oracle import BF16, full_logprobs
from recorded_graphs import graphs
from uneven import check_mixed, compression
from vllm.config import CUDAGraphMode

from kvreclaim.integrations.vllm.entry import worker_hooks
from kvreclaim.integrations.vllm.v0_32 import cells_side
from kvreclaim.integrations.vllm.worker.cells import limits

SIZES = [1, 2, 4, 64, 256]
PLAIN, CELLS = "BatchDescriptor", "CellsDescriptor"
FULL = {
    CUDAGraphMode.FULL_DECODE_ONLY: {PLAIN, CELLS, "NONE"},
    CUDAGraphMode.FULL_AND_PIECEWISE: {PLAIN, CELLS, "PIECEWISE"},
    CUDAGraphMode.FULL: {PLAIN, CELLS, "NONE"},
}
"""The kinds of steps in each mode with full graphs."""


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tiny_stats: Path) -> Iterator[Engine]:
    """Tables as on a GPU, with heads of two budgets at most, so that a request without compression outgrows
    them."""
    real = cells_side.adopt_cells
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "WIDEST", 2)

        def adopt(runner: object, views: object, _: object) -> object:
            return real(runner, views, worker_hooks._limits(made_by[0]))

        made_by: list[object] = []
        heads = worker_hooks._heads
        patch.setattr(worker_hooks, "_heads", lambda worker, views: (made_by.append(worker), heads(worker, views))[1])
        patch.setattr(cells_side, "adopt_cells", adopt)
        made = Engine(tiny_model, compression=compression(tiny_stats), batch=4)
    yield made
    made.close()


@pytest.mark.parametrize("mode", list(CUDAGraphMode), ids=lambda mode: mode.name)
def test_every_step_in_every_mode(engine: Engine, tiny_model: Path, mode: CUDAGraphMode) -> None:
    tables = engine.runner.reclaim.uneven.heads
    assert tables.fixed == 2 * 128 + 63 + 256
    with graphs(engine, mode, SIZES) as seen:
        [prompt] = random_prompts((70,), seed=8)
        [answer] = engine.generate([prompt], 20)
        assert float((full_logprobs(tiny_model, prompt, answer.tokens) - answer.logprobs).abs().mean()) <= BF16
        alone = dict(seen)
        check_mixed(engine, tiny_model, 3, (600, 450, 500, 400))
    assert CELLS not in alone, "no request was compressed"
    assert set(seen) == FULL.get(mode, {mode.name})
    if mode in FULL:
        assert alone[PLAIN] >= 19
        assert seen[CELLS] > 40
