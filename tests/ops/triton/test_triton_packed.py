"""Products with packed weights, against the weights as numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import tiny_packed
import torch
from launches import counted
from random_rows import KINDS, random_rows
from torch import Tensor
from triton_pair import DEVICE

from kvreclaim import LLM, SamplingParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.packed import PackedMatrix, joined_matrices
from kvreclaim.ops.triton.packed import FEW_ROWS, packed_linear, unpack_rows
from kvreclaim.ops.triton.support import is_interpreted

OUT, COLUMNS = 72, 512


def on_device(kind: str, out: int = OUT, columns: int = COLUMNS) -> tuple[PackedMatrix, Tensor]:
    """A matrix, and its weights as fp64 numbers."""
    rows = random_rows(kind, out, columns)
    return PackedMatrix([rows], out).to(DEVICE), rows.dequantised().double().to(DEVICE)


def random_x(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_come_back(kind: str) -> None:
    matrix, weight = on_device(kind)
    ids = torch.tensor([OUT - 1, 0, 7, 7, 33], device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = unpack_rows(matrix, ids, dtype)
        torch.testing.assert_close(got, weight[ids].float().to(dtype), rtol=1e-6, atol=1e-6)
    assert unpack_rows(matrix, ids[:0], torch.float32).shape == (0, COLUMNS)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_products(kind: str) -> None:
    matrix, weight = on_device(kind)
    for count in (1, 5, 17, FEW_ROWS + 3):
        x = random_x(count, COLUMNS, torch.float32)
        bound = 3e-6 * float((x.abs().double() @ weight.abs().T).max())
        got = packed_linear(x, [matrix], activations="exact")
        torch.testing.assert_close(got.double(), x.double() @ weight.T, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["zero", "q4_k", "q6_k"])
def test_products_of_16_bits(kind: str, dtype: torch.dtype) -> None:
    """Weights are rounded once, to x's dtype, as those of a model in that dtype are."""
    matrix, weight = on_device(kind)
    for count in (1, 3, FEW_ROWS):
        x = random_x(count, COLUMNS, dtype)
        got = packed_linear(x, [matrix])
        assert got.dtype is dtype
        largest = float((x.double() @ weight.T).abs().max())
        off = float((got.double() - x.double() @ weight.T).abs().max())
        assert off <= torch.finfo(dtype).eps * 2 * largest


def test_matrices_side_by_side_with_a_bias() -> None:
    pairs = [on_device("q4_k", 64), on_device("q6_k", 40), on_device("zero", 48)]
    x, bias = random_x(3, COLUMNS, torch.float32), random_x(1, 152, torch.float32)[0]
    got = packed_linear(x.view(1, 3, -1), [matrix for matrix, _ in pairs], bias, activations="exact")
    want = x.double() @ torch.cat([weight for _, weight in pairs]).T + bias.double()
    assert got.shape == (1, 3, 152)
    torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=1e-3)
    matrices, residual = [matrix for matrix, _ in pairs], random_x(3, 152, torch.float32)
    for given in (None, bias):
        plain = packed_linear(x, matrices, given, activations="exact")
        added = packed_linear(x, matrices, given, activations="exact", residual=residual)
        torch.testing.assert_close(added, plain + residual)


def test_matrices_of_one_kind_become_one() -> None:
    """Parts keep their order and have no bytes of their own; those of other codes stay apart."""
    pairs = [on_device("zero", 64), on_device("zero", 40), on_device("q6_k", 48)]
    matrices, x = [matrix for matrix, _ in pairs], random_x(3, COLUMNS, torch.float32)
    want = [packed_linear(x, [matrix], activations="exact") for matrix in matrices]
    joined = joined_matrices(matrices)
    assert [each.out_features for each in joined] == [104, 48]
    assert torch.equal(packed_linear(x, joined, activations="exact"), torch.cat(want, -1))
    for matrix, own in zip(matrices, want, strict=True):
        assert torch.equal(packed_linear(x, [matrix], activations="exact"), own)
    for name, part in joined[0].parts.items():
        (start,) = {each.parts[name].untyped_storage().data_ptr() for each in matrices[:2]}
        assert start == part.data_ptr()


def test_columns_are_split_where_outputs_are_few() -> None:
    """K of 4,096 in parts of 256 and more, which one launch adds up, with a bias and a residual, too."""
    matrix, weight = on_device("zero", 16, 4096)
    x, residual = random_x(2, 4096, torch.float32), random_x(2, 16, torch.float32)
    bound = 3e-6 * float((x.abs().double() @ weight.abs().T).max())
    exact = x.double() @ weight.T
    with counted() as launches:
        got = packed_linear(x, [matrix], activations="exact")
        added = packed_linear(x, [matrix], residual[0], activations="exact", residual=residual)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=bound)
    torch.testing.assert_close(added.double(), exact + residual[0] + residual, rtol=0, atol=2 * bound)
    assert launches.total == 4 or not is_interpreted()


@pytest.mark.parametrize("kind", ["awq", "bitsandbytes", "gguf"])
def test_a_model_answers_as_its_weights_as_numbers_do(kind: str, tmp_path: Path, monkeypatch) -> None:
    """Prompts of more and fewer rows than become numbers first; the GGUF has packed embeddings, too."""
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    path = tmp_path / ("tiny.gguf" if kind == "gguf" else "")
    write = tiny_gguf.write if kind == "gguf" else partial(tiny_packed.write, kind)
    source = write(path, num_hidden_layers=1)
    options = {"dtype": "float32", "device": str(DEVICE), "kernels": "triton", "num_blocks": 64}
    llm = LLM(path, quantized_activations="exact", **options)
    assert "exact activations, triton)" in llm.loaded.modules
    prompts = tiny.prompts((5, FEW_ROWS), seed=1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    answers = llm.generate(prompts, params)
    if kind == "gguf":  # whose source was rounded to bf16
        assert all(answer.error is None for answer in answers)
        llm = LLM(path, device="cpu", dtype="float32", num_blocks=64, quantized_activations="exact")
        want = [other.outputs[0].token_ids for other in llm.generate(prompts, params)]
    else:
        want = [_greedy(source, prompt) for prompt in prompts]
    assert [answer.outputs[0].token_ids for answer in answers] == want
    with pytest.raises(InvalidArgumentError, match="pass 'auto' or 'exact' on a GPU"):
        LLM(path, quantized_activations="int8", **options)


def _greedy(source: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        found = source.generate(
            torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return found[0, len(prompt) :].tolist()
