"""What the back-end says about itself, with and without triton, a GPU or the interpreter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from triton_pair import DEVICE

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.backend import Need, choose_backend
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.triton import support


def need(
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICE,
    name: str = "fp32",
    rank: int = 0,
) -> Need:
    """rank: of a latent cache, whose keys have dim dims behind it."""
    facts = LayerFacts(8, 1, rank + dim, rank or dim, Softmax(0.125), latent=bool(rank))
    return Need((facts,), 16, dtype, device, FORMATS[name])


@pytest.mark.parametrize("dim", [8, 32, 80, 256])
@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
def test_what_is_served(dim: int, dtype: torch.dtype) -> None:
    assert kernels.unavailable_reason() is None
    assert kernels.unsupported_reason(need(dim, dtype)) is None
    assert kernels.describe().startswith("triton (")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_latent_caches_are_served(name: str) -> None:
    assert kernels.unsupported_reason(need(name=name)) is None
    assert kernels.unsupported_reason(need(64, torch.bfloat16, name=name, rank=512)) is None


@pytest.mark.parametrize(
    ("needed", "reason"),
    [
        (need(dim=288), "head dim 288 is above 256"),
        (need(dtype=torch.float64), "float64"),
        (need(rank=640), "head dim 640 is above 512"),
        (need(dim=7, name="int4"), "odd"),
    ],
    ids=["dim", "dtype", "rank", "odd"],
)
def test_what_is_not_served_is_named(needed: Need, reason: str) -> None:
    assert reason in str(kernels.unsupported_reason(needed))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int4"])
def test_wide_latents_in_fp32_take_the_reference_on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also where fp32 queries meet bf16 latents. Compiled kernels would spill kilobytes of registers."""
    wide, device = need(rank=512, name=name), torch.device("cuda")
    if support.is_interpreted():
        assert kernels.unsupported_reason(wide) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wide = replace(wide, device=device)
    choice = choose_backend("auto", wide)
    assert choice.backend.NAME == "reference"
    assert "latents of 512 dims in fp32 take more registers" in str(choice.why_not)
    with pytest.raises(InvalidArgumentError, match="latents of 512 dims in fp32"):
        choose_backend("triton", wide)
    for served in (need(64, torch.bfloat16, device, "int4", 512), need(rank=256, device=device, name=name)):
        assert kernels.unsupported_reason(served) is None


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "TRITON_INTERPRET" in str(kernels.unavailable_reason())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.unavailable_reason() is None
    assert "cpu" in str(kernels.unsupported_reason(need(device=torch.device("cpu"))))


def test_importing_without_triton() -> None:
    """The package stays importable and says what is missing."""
    code = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "from kvreclaim.ops import triton\n"
        "print(triton.NAME, triton.unavailable_reason(), 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "triton triton is not installed False"


@pytest.mark.parametrize(("dim", "columns"), [(1, 16), (16, 16), (17, 32), (80, 128), (128, 128), (129, 256)])
def test_tiles_are_powers_of_two(dim: int, columns: int) -> None:
    assert support.padded(dim) == columns
