"""Every setting that changes the bytes of a block changes its namespace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.offload.store.namespace import FIELDS, Namespace, weights_digest

from .slot_files import namespace


def test_every_field_counts() -> None:
    digests = {namespace(**{name: "other"}).hex for name in FIELDS} | {namespace().hex}
    assert len(digests) == len(FIELDS) + 1
    assert all(len(digest) == 64 for digest in digests)
    assert Namespace(dict(reversed(namespace().fields.items()))).hex == namespace().hex


def test_text_does_not_move_from_one_field_to_the_next() -> None:
    assert namespace(dtype="ab", rope="c").hex != namespace(dtype="a", rope="bc").hex


@pytest.mark.parametrize(
    "fields", [{}, dict.fromkeys([*FIELDS, "lora"], "x"), dict.fromkeys(FIELDS[1:], "x")]
)
def test_fields_are_exactly_those(fields: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match="missing or unknown"):
        Namespace(fields)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(33, 40), nn.Linear(40, 7, bias=False), nn.LayerNorm(7))
    module.register_buffer("table", torch.randn(5, 6), persistent=False)
    module.register_buffer("none", torch.empty(0))
    module.register_buffer("scalar", torch.tensor(3))
    return module.to(dtype)


def digest(module: nn.Module, num_threads: int = 1) -> str:
    return weights_digest([*module.named_parameters(), *module.named_buffers()], num_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_one_bit_of_any_tensor_counts(dtype: torch.dtype) -> None:
    module = model(dtype)
    before = digest(module)
    assert before == digest(model(dtype))
    seen = {before}
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.numel():
            continue
        flat = tensor.view(-1).view(torch.uint8)
        for at in (0, len(flat) // 2, len(flat) - 1):
            flat[at] ^= 1
            seen.add(digest(module))
            flat[at] ^= 1
    assert digest(module) == before
    assert len(seen) == 1 + 3 * 7


def test_the_digest_does_not_depend_on_threads_order_or_strides() -> None:
    tensors = [*model().named_parameters(), *model().named_buffers()]
    whole = weights_digest(tensors)
    assert whole == weights_digest(tensors, num_threads=5) == weights_digest(reversed(tensors))
    turned = [(name, t.t().contiguous().t() if t.dim() == 2 else t) for name, t in tensors]
    assert not turned[0][1].is_contiguous()
    assert whole == weights_digest(turned)


def test_names_dtypes_and_shapes_count() -> None:
    zeros = torch.zeros(4, 2)
    same = [zeros, zeros.view(2, 4), zeros.view(torch.int32), torch.zeros(8, 2, dtype=torch.bfloat16)]
    digests = {weights_digest([("a", tensor)]) for tensor in same} | {weights_digest([("b", zeros)])}
    assert len(digests) == 5


def test_large_tensors_are_hashed_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000)
    whole = weights_digest([("a", tensor)])
    monkeypatch.setattr("kvreclaim.offload.store.namespace.CHUNK_BYTES", 24)
    assert weights_digest([("a", tensor)]) == whole
    tensor[-1] += 1
    assert weights_digest([("a", tensor)]) != whole


class Packed(torch.Tensor):
    """A weight of codes and scales, as quantisation libraries make them."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        self.codes, self.scales, self.bits = codes, scales, bits

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> None:
        raise NotImplementedError(func)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int]]:
        return ["codes", "scales"], (self.bits,)


def test_packed_weights_are_hashed_by_their_parts() -> None:
    codes, scales = torch.arange(8, dtype=torch.uint8).view(2, 4), torch.ones(2)
    other = codes.clone()
    other[1, 3] = 9
    packed = [(codes, scales, 4), (other, scales, 4), (codes, scales * 2, 4), (codes, scales, 8)]
    assert len({weights_digest([("w", Packed(*parts))]) for parts in packed}) == 4


def test_weights_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"w is a torch\.sparse_coo tensor"):
        weights_digest([("w", torch.eye(3).to_sparse())])
    with pytest.raises(InvalidArgumentError, match="on meta"):
        weights_digest([("w", torch.empty(3, device="meta"))])
