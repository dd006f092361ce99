"""The forward pass that decode graphs replay makes no tensors of host data and reads none on the host, which
a CUDA graph's capture refuses. Found on the CPU, by a mode that refuses the same calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from format_fill import Rig, fill
from paged_oracle import Ask, Shape, under
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.calibrate import calibration
from kvreclaim.engine.api import model_engine
from kvreclaim.engine.execute.graphs import DecodeGraphs, GraphKind
from kvreclaim.model import loader
from kvreclaim.ops import reference
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.triton import support

if not support.is_interpreted():
    pytest.skip("a GPU captures by itself: tests/engine/test_graphs.py", allow_module_level=True)

REFUSED = {
    *(torch.tensor, torch.as_tensor, torch.from_numpy, torch.nonzero, torch.unique),
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.pin_memory, Tensor.nonzero),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
}


class CaptureRefusedError(RuntimeError):
    """A call that a capture refuses."""


class Capture(TorchFunctionMode):
    """Refuses what a capture refuses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in REFUSED:
            raise CaptureRefusedError(func.__name__)
        return func(*args, **(kwargs or {}))


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """engine.execute.graphs.Capture: warms up, then runs once under the mode."""
    run()
    with Capture():
        run()
    return run


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched. The interpreter itself reads tensors, which a GPU does not."""
    launch, names = GridExecutor.__call__, []

    def call(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        with torch._C.DisableTorchFunction():
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    return names


@pytest.mark.parametrize("name", FORMATS)
def test_kernels_of_every_format(name: str, launches: list[str]) -> None:
    dtype = FORMATS[name].dtype if FORMATS[name].is_plain else torch.float32
    w = fill(Rig(reference, FORMATS[name], dtype), Shape(2, 4, 64, dtype=dtype), [Ask(1, 40), Ask(1, 30)])
    arrays, layer, slots = w.batch.arrays, under(w.cache, 0, scale=0.125), torch.full((2,), -1)
    k, v = torch.randn(2, 2, 2, 64).to(dtype)

    def run() -> Tensor:
        kernels.write_kv(layer, k, v, slots)
        tables = kernels.static_tables(
            arrays.block_table, arrays.seq_lens, arrays.shifts, num_kv_heads=2, max_seq_len=64
        )
        return kernels.decode_attention(w.q[0], layer, tables)

    captured(run)
    assert "decode_kernel" in launches


@pytest.mark.parametrize("kind", [GraphKind(), GraphKind(unequal=True), GraphKind(queries=True)])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_decode_steps_of_every_family(
    tiny_dir: Callable[[str], Any], family: str, kind: GraphKind, launches: list[str]
) -> None:
    given = {"dtype": "float32", "device": "cpu", "kernels": "triton", "max_model_len": 64}
    engine = LLM(tiny_dir(family), num_blocks=40, **given).engine
    limits = {"max_num_seqs": 2, "max_model_len": 64, "max_chunk": 64}
    graphs = DecodeGraphs(
        engine.loaded.model, engine.cache, engine.backend, engine.groups, **limits, capture=captured
    )
    with torch.inference_mode():
        assert graphs._prepare(2, kind) is None
    assert "decode_kernel" in launches


def test_the_mode_refuses_what_a_capture_refuses() -> None:
    with pytest.raises(CaptureRefusedError, match="tensor"):
        captured(lambda: torch.tensor([1.0]) + 1)
    with pytest.raises(CaptureRefusedError, match="item"):
        captured(lambda: torch.ones(1).item())


def test_every_kernel_is_launched_on_the_engines_device(
    tiny_dir: Callable[[str], Any], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the thread's current device, whatever device its tensors lie on."""
    depth, launch = [0], GridExecutor.__call__

    @contextmanager
    def entered(device: torch.device) -> Any:
        assert device == torch.device("cpu")
        depth[0] += 1
        yield
        depth[0] -= 1

    def call(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        assert depth[0] > 0, f"{self.fn.__name__} runs on whichever device is current"
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    for module in (model_engine, loader, calibration):
        monkeypatch.setattr(module, "on_device", entered)
    given = {"dtype": "float32", "device": "cpu", "kernels": "triton", "block_size": 4}
    with LLM(tiny_dir("llama"), num_blocks=12, **given) as llm:
        monkeypatch.setattr(llm.engine, "on_device", lambda: entered(torch.device("cpu")))
        config = CompressionConfig("knorm", budget=12, interval=4, sinks=2, recent=4)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = llm.generate(tiny.prompts((17, 9), seed=1), params, config)
        assert [out.error for out in outputs] == [None, None]
    assert {"decode_kernel", "write_kernel", "compact_kernel"} <= set(launches)
    assert depth == [0]
