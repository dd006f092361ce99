"""Recurrent layers run natively where that computes what transformers' code does, and only there."""

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
from kvreclaim.ops.states import PackedRuns, StateRun, StateStep, StateStore

pytestmark = pytest.mark.skipif(missing_steps() is not None, reason="no native steps here")
TAKEN = ("qwen3-next", "qwen3.5", "lfm2", "granite4", "falcon-h1", "bamba", "jamba", "nemotron-h", "zamba2")
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}


def mixers(loaded: LoadedModel) -> list[Mixer]:
    assert loaded.recurrent is not None
    return loaded.recurrent.mixers


STEPS = (
    (StateRun(0, 21, None, [0]), StateRun(21, 1, None, [1])),
    (StateRun(0, 1, 0, [2]), StateRun(1, 9, 1, [3, 4, 5])),
    (StateRun(0, 1, 2, [1]), StateRun(1, 1, 4, [0])),
    (StateRun(0, 3, 1, [2, 3, 4]), StateRun(3, 5, 0, [6])),
)
"""Prompts that begin and go on, decoded tokens and drafts."""


@torch.inference_mode()
def computed(mixer: Mixer, native: bool) -> list[Tensor]:
    """Outputs of STEPS and the states behind them."""
    store = StateStore([mixer.shapes], 7, torch.device("cpu"))
    generator, found = torch.Generator().manual_seed(4), list[Tensor]()
    for runs in STEPS:
        step = StateStep(store, runs)
        count = runs[-1].start + runs[-1].num_tokens
        x = torch.randn((count, mixer.module.out_proj.out_features), generator=generator)
        x = x.to(mixer.module.out_proj.weight.dtype)
        if native:
            assert mixer.native is not None
            found.append(mixer.native(x, store.layers[0], PackedRuns.of(runs)))
        else:
            found.append(mixer.by_own_code(step, x, {}, 0))
    return [*found, *store.layers[0].values()]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", TAKEN)
def test_steps_and_prompts_are_those_of_transformers(
    tiny_dir: Callable[[str], Path], family: str, dtype: str
) -> None:
    loaded = load_model(tiny_dir(family), dtype=dtype, kernels="native")
    count = len(mixers(loaded))
    assert f"recurrent layers: {count}, {count} of them native" in loaded.modules
    for mixer in mixers(loaded):
        for got, want in zip(computed(mixer, native=True), computed(mixer, native=False), strict=True):
            largest = float(want.float().abs().max())
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype] * largest)


def test_nothing_is_native_where_kernels_are_torchs(tiny_dir: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_dir("qwen3-next"), kernels="torch")
    assert all(mixer.native is None for mixer in mixers(loaded))
    assert loaded.modules.endswith("recurrent layers: 2")


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1", "jamba", "lfm2"])
def test_layers_that_compute_something_else_are_refused(tiny_dir: Callable[[str], Path], family: str) -> None:
    """The known parts by name, but twice the result, or another activation; the other layers stay native."""
    loaded = load_model(tiny_dir(family), kernels="native")
    first, *others = mixers(loaded)
    assert loaded.recurrent is not None
    own = first.forward
    first.forward = lambda *args, **kwargs: 2 * own(*args, **kwargs)
    line = use_native_mixers(loaded.recurrent)
    assert line == f"recurrent layers: {len(others) + 1}, {len(others)} of them native"
    assert first.native is None
    first.forward = own
    if family != "lfm2":
        first.module.activation = "gelu"
        assert use_native_mixers(loaded.recurrent) == line
