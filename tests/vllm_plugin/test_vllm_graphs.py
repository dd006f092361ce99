"""CUDA graphs in each of vLLM's modes, over its V1 runner: requests of every kind, compressed and not, answer
as transformers does with the same tokens dropped, and a step without compressed requests is vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Engine
from models import random_prompts
from oracle import BF16, full_logprobs
from recorded_graphs import Graph, Recording, graphs
from uneven import check_mixed, compression
from vllm.config import CUDAGraphMode

from kvreclaim.integrations.vllm.entry import worker_hooks
from kvreclaim.integrations.vllm.v0_32 import cells_side
from kvreclaim.integrations.vllm.v0_32.cells_graphs import CellsGraphs, add_graphs
from kvreclaim.integrations.vllm.worker.cells import limits
from kvreclaim.integrations.vllm.worker.cells.heads import MAX_ENTRIES, StepKind

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

    def heads(worker: Any, views: Any) -> Any:
        with torch.inference_mode():
            return cells_side.adopt_cells(worker.model_runner, views, worker_hooks._limits(worker))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "WIDEST", 2)
        patch.setattr(worker_hooks, "_heads", heads)
        made = Engine(tiny_model, compression=compression(tiny_stats), batch=4)
    yield made
    made.close()


def test_tables_take_what_is_reserved(engine: Engine) -> None:
    tables = engine.runner.reclaim.uneven.heads
    assert tables.fixed == 2 * 128 + 63 + 256
    fixed = tables._table.nbytes + tables._tables.nbytes
    assert 0 < fixed <= worker_hooks._tables(engine.worker) - 24 * MAX_ENTRIES


@pytest.mark.parametrize("mode", list(CUDAGraphMode), ids=lambda mode: mode.name)
def test_every_step_in_every_mode(engine: Engine, tiny_model: Path, mode: CUDAGraphMode) -> None:
    with graphs(engine, mode, SIZES) as seen:
        [prompt] = random_prompts((70,), seed=8)
        [answer] = engine.generate([prompt], 20)
        assert (
            float((full_logprobs(tiny_model, prompt, answer.tokens) - answer.logprobs).abs().mean()) <= BF16
        )
        alone = dict(seen)
        check_mixed(engine, tiny_model, 3, (600, 450, 500, 400))
    assert CELLS not in alone, "no request was compressed"
    assert set(seen) == FULL.get(mode, {mode.name})
    if mode in FULL:
        assert alone[PLAIN] >= 19
        assert seen[CELLS] > 40


@pytest.mark.parametrize("mode", list(CUDAGraphMode), ids=lambda mode: mode.name)
def test_graphs_of_the_v2_runner(mode: CUDAGraphMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own manager captures one set over its tables and a full one over cells. A step takes its own; a
    split step none that is full."""
    made, replayed = make_manager(mode, monkeypatch), list[str]()

    def forward(desc: Any, warmup: bool) -> Any:
        name = "cells" if made.reclaim.capturing else "plain"
        return lambda own: None if warmup else replayed.append(f"{name} {desc.num_tokens}")

    assert made.cudagraph_mode is mode
    made.capture(forward)
    full = list(made._capture_descs.get(CUDAGraphMode.FULL, []))
    assert bool(full) is mode.has_full_cudagraphs()
    assert list(made.graphs) == list(made.over_cells) == full
    assert not made.reclaim.capturing
    for kind in StepKind:
        made.reclaim.kind, made.reclaim.taken = kind, kind is not StepKind.PLAIN
        desc = made.dispatch(3, 3, 1, 0, 1)
        if kind is StepKind.SPLIT or not full:
            assert desc.cg_mode is mode.mixed_mode() or desc.cg_mode is CUDAGraphMode.NONE
            assert desc.cg_mode is not CUDAGraphMode.FULL
            continue
        assert desc.num_tokens == 4
        graphs_of = made.over_cells if kind is StepKind.CELLS else made.graphs
        graphs_of[desc].steps.append(lambda kind=kind: replayed.append(kind.name))
        replayed.clear()
        made.run_fullgraph(desc)
        assert replayed == [kind.name]


def make_manager(mode: CUDAGraphMode, patch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.worker.gpu import cudagraph_utils

    compilation = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8], max_cudagraph_capture_size=8)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        compilation_config=compilation,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    patch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    patch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    patch.setattr(cudagraph_utils, "graph_capture", lambda device: nullcontext())
    patch.setattr(cudagraph_utils, "current_stream", lambda: None)
    patch.setattr(cudagraph_utils, "capture_pool", lambda *_: nullcontext())
    pool = SimpleNamespace(get_global_graph_pool=lambda: None)
    patch.setattr(cudagraph_utils, "current_platform", pool)
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", lambda graph, *_, **__: Recording(graph))
    made = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, 1)
    add_graphs(made, CellsGraphs, Announcements())
    return made


class Announcements:
    """Stands for HeadTables."""

    kind, taken, capturing = StepKind.PLAIN, False, False

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        yield
        self.capturing = False
