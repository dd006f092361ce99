"""CUDA graphs on a CPU: what PyTorch did in a captured region is done again, at the same addresses and with
the same numbers from the host. vLLM's own wrapper and dispatcher of graphs capture and replay them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"})
"""Operations in which the host waits for the device: no graph can hold them."""


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def replay(self) -> None:
        for step in self.steps:
            step()


class Recording(TorchDispatchMode):
    """Stands for torch.cuda.graph."""

    def __init__(self, graph: Graph, **_: Any) -> None:
        super().__init__()
        self.graph, self.in_kernel = graph, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if not self.in_kernel:
            assert func._schema.name not in WAITS, f"{func} in a graph"
            self.graph.steps.append(lambda: _again(func, args, kwargs, found))
        return found

    def kernel(self, run: Callable[[], None]) -> None:
        """Run a kernel that plans on the device."""
        self.in_kernel = True
        run()
        self.in_kernel = False
        self.graph.steps.append(run)


def _again(func: Any, args: Any, kwargs: Any, found: Any) -> None:
    for old, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
        if (
            isinstance(old, torch.Tensor)
            and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
        ):
            old.copy_(new)


@contextmanager
def graphs(engine: Engine, mode: Any, sizes: list[int]) -> Iterator[Counter[str]]:
    """Capture graphs in an engine with vLLM's V1 runner, and replay them in its steps. Yields: steps by the
    name of their key's class, and those in no full graph by the name of their mode."""
    from vllm.compilation import cuda_graph
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled

    runner, dispatcher = engine.runner, engine.runner.cudagraph_dispatcher
    config, seen = runner.compilation_config, Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        _stand_in(patch, cuda_graph, [layer.impl for layer in attention_layers(engine)])
        patch.setattr(config, "cudagraph_mode", mode)
        patch.setattr(config, "cudagraph_capture_sizes", sizes)
        patch.setattr(config, "max_cudagraph_capture_size", max(sizes))
        patch.setattr(dispatcher, "cudagraph_keys", {key: set() for key in dispatcher.cudagraph_keys})
        for layer in attention_layers(engine):
            patch.setattr(layer, "use_direct_call", True)
        dispatcher.initialize_cudagraph_keys(mode, 1)
        if mode.has_full_cudagraphs():
            wrapper = cuda_graph.CUDAGraphWrapper(runner.model, engine.config, type(mode).FULL)
            patch.setattr(runner, "model", wrapper)
        set_cudagraph_capturing_enabled(True)
        for own, descriptors in dispatcher.get_capture_descs():
            runner._capture_cudagraphs(descriptors, own)
        set_cudagraph_capturing_enabled(False)
        dispatch = dispatcher.dispatch

        def counted(*args: Any, **kwargs: Any) -> Any:
            own, key = dispatch(*args, **kwargs)
            seen[type(key).__name__ if own == type(mode).FULL else own.name] += 1
            return own, key

        patch.setattr(dispatcher, "dispatch", counted)
        yield seen
        dispatcher.keys_initialized = False


def attention_layers(engine: Engine) -> list[Any]:
    from vllm.model_executor.layers.attention import Attention

    return [layer for layer in engine.runner.model.modules() if isinstance(layer, Attention)]


def _stand_in(patch: pytest.MonkeyPatch, cuda_graph: Any, impls: list[Any]) -> None:
    from vllm import _custom_ops

    plan, attend = _custom_ops.cpu_attn_get_scheduler_metadata, _custom_ops.cpu_attention_with_kv_cache
    known: dict[str, Any] = {}
    active: list[Recording] = []

    @contextmanager
    def record(graph: Graph, **_: Any) -> Iterator[None]:
        with Recording(graph) as recording:
            active.append(recording)
            yield
            active.pop()

    def planned(**call: Any) -> Any:
        known.update(isa=call["isa"], enable_kv_split=call["enable_kv_split"], dtype=call["dtype"])
        return None if active else plan(**call)

    def attended(**call: Any) -> None:
        def run() -> None:
            query, keys = call["query"], call["key_cache"]
            fresh = plan(
                num_reqs=len(call["seq_lens"]),
                num_heads=query.shape[1],
                num_kv_heads=keys.shape[1],
                head_dim=query.shape[2],
                seq_lens=call["seq_lens"],
                query_start_loc=call["query_start_loc"],
                causal=call["causal"],
                sliding_window_size=call["sliding_window"],
                kv_cache_dtype=call["kv_cache_dtype"],
                **known,
            )
            attend(**{**call, "scheduler_metadata": fresh})

        active[-1].kernel(run) if active else run()

    patch.setattr(_custom_ops, "cpu_attn_get_scheduler_metadata", planned)
    patch.setattr(_custom_ops, "cpu_attention_with_kv_cache", attended)
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", record)
    patch.setattr(torch.accelerator, "synchronize", lambda: None)
    patch.setattr(cuda_graph, "current_stream", lambda: None)
    patch.setattr(cuda_graph, "capture_pool", lambda *_: nullcontext())
    patch.setattr(cuda_graph, "weak_ref_tensors", lambda x: x)
    patch.setattr(cuda_graph, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
