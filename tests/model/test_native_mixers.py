"""Recurrent layers decode natively where that computes what transformers' code does, and only there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvreclaim.model.loader import LoadedModel, load_model
from kvreclaim.model.native_mixers import use_native_mixers
from kvreclaim.model.recurrent import Mixer
from kvreclaim.ops.native.recurrent import missing_steps
from kvreclaim.ops.states import StateCall, StateStore

pytestmark = pytest.mark.skipif(missing_steps() is not None, reason="no native steps here")
TAKEN = ("qwen3-next", "qwen3.5", "lfm2", "granite4", "falcon-h1", "bamba", "nemotron-h", "zamba2")
LEFT = ("jamba",)
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}


def mixers(loaded: LoadedModel) -> list[Mixer]:
    assert loaded.recurrent is not None
    return loaded.recurrent.mixers


@torch.inference_mode()
def decoded(mixer: Mixer, native: bool) -> list[Tensor]:
    """Outputs and states of three tokens of two sequences, from slots to slots."""
    store = StateStore([mixer.shapes], 6, torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    for states in store.layers[0].values():
        states.copy_(torch.randn(states.shape, generator=generator))
    slots, found = torch.tensor([3, 1]), []
    chosen, mixer.layer = mixer.native, 0
    try:
        mixer.native = chosen if native else None
        for n in range(3):
            x = torch.randn((2, mixer.module.out_proj.out_features), generator=generator)
            after = torch.tensor([[0, 5], [3, 1], [2, 4]][n])
            call = StateCall(slice(0, 2), True, slots, after)
            found.append(mixer._call(store, call, x.to(mixer.module.out_proj.weight.dtype), {}))
            slots = after
    finally:
        mixer.native = chosen
    return [*found, *(states[slots] for states in store.layers[0].values())]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", TAKEN)
def test_steps_are_those_of_transformers(tiny_dir: Callable[[str], Path], family: str, dtype: str) -> None:
    loaded = load_model(tiny_dir(family), dtype=dtype, kernels="native")
    count = len(mixers(loaded))
    assert f"recurrent layers: {count}, {count} decode natively" in loaded.modules
    for mixer in mixers(loaded):
        for got, want in zip(decoded(mixer, native=True), decoded(mixer, native=False), strict=True):
            largest = float(want.float().abs().max())
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype] * largest)


@pytest.mark.parametrize("family", LEFT)
def test_other_layers_keep_their_code(tiny_dir: Callable[[str], Path], family: str) -> None:
    loaded = load_model(tiny_dir(family), kernels="native")
    assert all(mixer.native is None for mixer in mixers(loaded))
    assert ", 0 decode natively" in loaded.modules


def test_nothing_is_native_where_kernels_are_torchs(tiny_dir: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_dir("qwen3-next"), kernels="torch")
    assert all(mixer.native is None for mixer in mixers(loaded))
    assert loaded.modules.endswith("recurrent layers: 2")


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1", "lfm2"])
def test_layers_that_compute_something_else_are_refused(tiny_dir: Callable[[str], Path], family: str) -> None:
    """The known parts by name, but twice the result, or another activation; the other layers stay native."""
    loaded = load_model(tiny_dir(family), kernels="native")
    first, *others = mixers(loaded)
    assert loaded.recurrent is not None
    own = first.forward
    first.forward = lambda *args, **kwargs: 2 * own(*args, **kwargs)
    line = use_native_mixers(loaded.recurrent)
    assert line == f"recurrent layers: {len(others) + 1}, {len(others)} decode natively"
    assert first.native is None
    first.forward = own
    if family != "lfm2":
        first.module.activation = "gelu"
        assert use_native_mixers(loaded.recurrent) == line
