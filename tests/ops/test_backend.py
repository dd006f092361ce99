"""Kernels are chosen by name or by need, and the choice is described."""

from __future__ import annotations

import importlib

import pytest
import torch

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import reference
from kvreclaim.ops.backend import BACKENDS, Need, choose_backend
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import plain_format

FUNCTIONS = (
    "allocate",
    "column_sums",
    "compact",
    "copy_blocks",
    "gather_tokens",
    "mixture_scores",
    "paged_attention",
    "prepare_blocks",
    "select_runs",
    "select_top",
    "surrogate_scores",
    "token_norms",
    "trig_norm_scores",
    "write_kv",
)


def need(block_size: int = 16, dtype: torch.dtype = torch.float32, dim: int = 64) -> Need:
    layers = (LayerFacts(8, 2, dim, dim, Softmax(0.125)),)
    return Need(layers, block_size, dtype, torch.device("cpu"), plain_format(torch.float32))


@pytest.mark.parametrize("name", BACKENDS)
def test_every_back_end_has_every_function(name: str) -> None:
    module = importlib.import_module(BACKENDS[name])
    if name != "reference" and module.unsupported_reason(need()) is not None:
        pytest.skip(str(module.unsupported_reason(need())))
    assert name == module.NAME
    assert all(callable(getattr(module, function)) for function in FUNCTIONS)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match="auto, native, triton, reference"):
        choose_backend("cuda", need())


def test_the_reference_is_taken_by_name_without_an_excuse() -> None:
    choice = choose_backend("reference", need())
    assert choice.backend is reference
    assert choice.why_not is None
    assert choice.describe() == "kernels: reference"


@pytest.mark.parametrize(
    "needed", [need(block_size=8), need(dtype=torch.float64), need(dim=7)], ids=["blocks", "dtype", "dim"]
)
def test_what_the_kernels_cannot_serve_falls_to_the_reference_and_says_why(needed: Need) -> None:
    choice = choose_backend("auto", needed)
    assert choice.backend is reference
    assert choice.why_not is not None
    assert choice.why_not in choice.describe()
    with pytest.raises(InvalidArgumentError, match="native"):
        choose_backend("native", needed)


def test_auto_takes_native_kernels_where_they_were_built() -> None:
    native = importlib.import_module(BACKENDS["native"])
    if (reason := native.unsupported_reason(need())) is not None:
        pytest.skip(reason)
    assert choose_backend("auto", need()).backend is native
