"""What checkpoints of 2 to 8 bits say, against known numbers and llama.cpp's own reader."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Form
from torch import Tensor

from kvreclaim.weights.checkpoints import awq_rows, compressed_rows, gptq_rows, nf4_rows
from kvreclaim.weights.ggml import FORMATS, ggml_rows

WORD = torch.tensor([[0x76543210]], dtype=torch.int32)
EIGHTS = torch.tensor([[-0x77777778]], dtype=torch.int32)  # 0x88888888
NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]


def read_of(**tensors: Tensor):
    return tensors.__getitem__


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float16)


def test_awq_keeps_columns_in_an_order_of_its_own() -> None:
    """One row of K, eight columns of N; the zeros in the same order."""
    rows = awq_rows(read_of(qweight=WORD, qzeros=WORD * 0, scales=ones(1, 8)), 0, 8)
    assert rows.codes.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    rows = awq_rows(read_of(qweight=WORD, qzeros=WORD, scales=ones(1, 8)), 0, 8)
    assert rows.dequantised().flatten().tolist() == [0.0] * 8


@pytest.mark.parametrize(("is_v1", "stored"), [(True, 0x77777777), (False, -0x77777778)])
def test_gptq_keeps_rows_in_order_and_zeros_less_one_in_v1(is_v1: bool, stored: int) -> None:
    zeros = torch.tensor([[stored]], dtype=torch.int32)
    tensors = read_of(qweight=WORD.expand(1, 8).contiguous(), qzeros=zeros, scales=ones(1, 8) * 0.5)
    rows = gptq_rows(tensors, 0, 8, is_v1=is_v1)
    assert rows.codes.tolist() == [list(range(8))] * 8
    assert rows.dequantised()[3].tolist() == [(q - 8) * 0.5 for q in range(8)]


def test_gptq_with_zeros_of_its_own() -> None:
    zeros = torch.tensor([[0x01234567]], dtype=torch.int32)  # row i: 7 - i, plus one
    tensors = read_of(qweight=WORD.expand(1, 8).contiguous(), qzeros=zeros, scales=ones(1, 8))
    want = [[q - (8 - n) for q in range(8)] for n in range(8)]
    assert gptq_rows(tensors, 0, 8, is_v1=True).dequantised().tolist() == want


def test_all_pieces_of_a_layer_have_one_rule() -> None:
    """Zeros of 8, and scales that fp16 holds, in the first eight rows alone."""
    zeros = torch.tensor([[0x77777777, 0x01234567]], dtype=torch.int32)
    scales = torch.tensor([[0.5] * 8 + [2.0**-30] * 8], dtype=torch.bfloat16)
    gptq = read_of(qweight=WORD.expand(1, 16).contiguous(), qzeros=zeros, scales=scales)
    awq = read_of(qweight=WORD.expand(8, 2).contiguous(), qzeros=zeros, scales=scales)
    words, shape = WORD.expand(16, 1).contiguous(), torch.tensor([16, 8])
    packed = read_of(weight_packed=words, weight_shape=shape, weight_scale=scales.T.contiguous())
    for read in (
        lambda first, last: gptq_rows(gptq, first, last, is_v1=True),
        lambda first, last: awq_rows(awq, first, last),
        lambda first, last: compressed_rows(packed, first, last, is_symmetric=True),
    ):
        pieces, whole = [read(0, 8), read(8, 16)], read(0, 16)
        assert {(piece.grid, piece.scales.dtype) for piece in pieces} == {(whole.grid, torch.float32)}
        assert torch.equal(torch.cat([piece.dequantised() for piece in pieces]), whole.dequantised())


def test_compressed_tensors_are_less_eight() -> None:
    tensors = {"weight_packed": WORD, "weight_scale": ones(1, 1), "weight_shape": torch.tensor([1, 8])}
    rows = compressed_rows(read_of(**tensors), 0, 1, is_symmetric=True)
    assert rows.dequantised().tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]


def test_compressed_tensors_with_zeros() -> None:
    """Zero points are packed along N."""
    packed = torch.cat([WORD] * 8)
    tensors = {"weight_packed": packed, "weight_scale": ones(8, 1), "weight_shape": torch.tensor([8, 8])}
    rows = compressed_rows(read_of(**tensors, weight_zero_point=WORD), 0, 8, is_symmetric=False)
    assert rows.dequantised().tolist() == [[q - n for q in range(8)] for n in range(8)]


def test_nf4_has_the_first_column_in_the_high_nibble() -> None:
    weight = torch.tensor([[16 * (i % 16) + (i + 1) % 16] for i in range(64)], dtype=torch.uint8)
    tensors = {
        "weight": weight,
        "weight.absmax": torch.tensor([2.0, 3.0]),
        "weight.quant_map": torch.tensor(NF4),
    }
    rows = nf4_rows(read_of(**tensors), 0, 2, state={"blocksize": 64}, columns=64)
    got = rows.dequantised()
    want = torch.tensor([NF4[j] for i in range(64) for j in (i % 16, (i + 1) % 16)]).view(2, 64)
    torch.testing.assert_close(got, want * torch.tensor([[2.0], [3.0]]), rtol=0, atol=0)
    nested = {"weight.absmax": torch.tensor([1, 2], dtype=torch.uint8)}
    nested["weight.nested_quant_map"] = torch.tensor([0.0, 0.25, 0.5])
    nested["weight.nested_absmax"] = torch.tensor([4.0])
    state = {"blocksize": 64, "nested_blocksize": 256, "nested_offset": 1.0}
    again = nf4_rows(read_of(**{**tensors, **nested}), 0, 2, state=state, columns=64)
    torch.testing.assert_close(again.dequantised(), got, rtol=0, atol=0)


def test_q4_0_by_hand() -> None:
    block = torch.tensor([*torch.tensor([0.5], dtype=torch.float16).view(torch.uint8), *[0x9A] * 16])
    got = ggml_rows("Q4_0", block.to(torch.uint8)[None]).dequantised()[0]
    assert got.tolist() == [1.0] * 16 + [0.5] * 16


def test_q4_k_by_hand() -> None:
    halfs = torch.tensor([0.5, 0.25], dtype=torch.float16).view(torch.uint8).tolist()
    block = halfs + list(bytes.fromhex("4182C3044586C708192A3B4C")) + list(range(128))
    rows = ggml_rows("Q4_K", torch.tensor([block], dtype=torch.uint8))
    want = [(1, 5), (2, 6), (3, 7), (4, 8), (25, 17), (42, 34), (59, 51), (12, 4)]
    assert [tuple(pair) for pair in rows.scales[0].tolist()] == want
    found = rows.dequantised()[0, [1, 33, 65, 97, 129, 161, 193, 225, 255]].tolist()
    assert found == [-0.75, -1.5, -0.25, 2, 8.25, 75.5, 16.75, 35, 41]


def test_q6_k_by_hand() -> None:
    d = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8).tolist()
    block = [*range(128), *(3 * i % 256 for i in range(64)), *((i - 8) % 256 for i in range(16)), *d]
    rows = ggml_rows("Q6_K", torch.tensor([block], dtype=torch.uint8))
    assert rows.dequantised()[0, [1, 33, 65, 97, 129, 255]].tolist() == [-68, 93, 64, 30, 0, 24.5]


HALFS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,)}
HALFS["Q2_K"] = (80, 82)
"""Where numbers of 16 bits lie in a block; elsewhere at its beginning."""


@pytest.mark.parametrize("name", FORMATS)
def test_random_blocks_are_those_of_the_gguf_package(name: str) -> None:
    form, generator = FORMATS[name], np.random.default_rng(5)
    data = generator.integers(0, 256, (6, 3 * form.num_bytes), dtype=np.uint8)
    blocks = data.reshape(6, 3, form.num_bytes)
    halfs = HALFS.get(name, (0,))
    for at in halfs:  # finite
        blocks[..., at : at + 2] = generator.normal(size=(6, 3, 1)).astype(np.float16).view(np.uint8)
    want = gguf.dequantize(data, Form[name])
    np.testing.assert_array_equal(ggml_rows(name, torch.from_numpy(data)).dequantised().numpy(), want)
