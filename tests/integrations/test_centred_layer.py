"""A layer with centred and scaled keys attends as one without, whatever it stores, compiled or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from toy_caches import B, Book, K, make_layers

from kvreclaim.integrations.vllm.worker.centred_layer import CentredKeys, centre, transform_of
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.ops.key_transform import KeyTransform

H, KV, D, T = 6, 2, 16, 40


class ToyAttention(nn.Module):
    """Attention over the tokens that it was given so far. stored: how it keeps keys"""

    def __init__(self, stored=lambda keys: keys) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = H, KV, D
        self.stored = stored
        self.keys, self.values = torch.zeros(0, KV, D), torch.zeros(0, KV, D)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float = 0.3) -> Tensor:
        queries = query.view(-1, H, D)
        self.keys = torch.cat([self.keys, self.stored(key.view(-1, KV, D))])
        self.values = torch.cat([self.values, value.view(-1, KV, D)])
        keys, values = (x.repeat_interleave(H // KV, 1) for x in (self.keys, self.values))
        logits = torch.einsum("thd,shd->hts", queries, keys) * scale
        hidden = torch.arange(len(keys)) > torch.arange(len(keys) - len(queries), len(keys))[:, None]
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, values).reshape(query.shape[0], -1)


class CentredToy(CentredKeys, ToyAttention):
    pass


def transform(seed: int = 0) -> KeyTransform:
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-3, 4, (KV, D), generator=generator)
    directions = torch.linalg.qr(torch.randn(KV, D, 2, generator=generator))[0].transpose(1, 2)
    gains = torch.rand(KV, 2, generator=generator) + 0.2
    return KeyTransform(scale, 50 * torch.randn(KV, D, generator=generator), directions, gains)


def tokens(flat: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A prompt and three tokens one by one, as parts of one projection, as vLLM's models split them."""
    generator, own, sizes = torch.Generator().manual_seed(1), transform(), (H * D, KV * D, KV * D)
    joined = torch.randn(T, sum(sizes), generator=generator)
    joined[:, sizes[0] : sizes[0] + sizes[1]] += own.center.flatten()
    shape = (lambda x, n: x) if flat else (lambda x, n: x.unflatten(-1, (n, D)))
    steps = [joined[: T - 3], *joined[T - 3 :].split(1)]
    return [
        tuple(shape(part, n) for part, n in zip(step.split(sizes, -1), (H, KV, KV), strict=True))  # type: ignore[misc]
        for step in steps
    ]


def run(layer: ToyAttention, flat: bool = True) -> Tensor:
    return torch.cat([layer(*step, scale=0.2) for step in tokens(flat)])


@pytest.mark.parametrize("flat", [True, False], ids=["TxHD", "TxHxD"])
def test_attention_is_that_of_the_layer_without(flat: bool) -> None:
    exact, layer, own = ToyAttention(), ToyAttention(), transform()
    centre(layer, CentredToy, own, torch.empty(0))
    torch.testing.assert_close(run(layer, flat), run(exact, flat), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.keys, own.stored(exact.keys), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.values, exact.values)


def test_a_code_loses_less() -> None:
    """Keys rounded to 16 levels of their largest number."""

    def coded(keys: Tensor) -> Tensor:
        step = keys.abs().amax(-1, keepdim=True) / 7
        return (keys / step).round() * step

    exact, plain, layer = run(ToyAttention()), run(ToyAttention(coded)), ToyAttention(coded)
    centre(layer, CentredToy, KeyTransform(torch.ones(KV, D), transform().center), torch.empty(0))
    assert (run(layer) - exact).abs().mean() < (plain - exact).abs().mean() / 4


def test_compiled_in_one_graph_with_buffers_as_inputs() -> None:
    """Other centres in the same buffers need no other code."""
    layer = ToyAttention()
    centre(layer, CentredToy, transform(), torch.empty(0))
    [step, *_] = tokens(True)

    def keys_of(layer: ToyAttention, step: tuple[Tensor, ...]) -> Tensor:
        layer(*step)
        return layer.keys

    compiled = torch.compile(keys_of, backend="aot_eager", fullgraph=True)
    for seed in (0, 5):
        own = transform(seed)
        layer.keys, layer.values = torch.zeros(0, KV, D), torch.zeros(0, KV, D)
        for name, part in zip(("inverse", "offset", "along", "keys"), own.of_keys, strict=True):
            getattr(layer, f"centring_{name}").copy_(part)
        with torch.compiler.set_stance("default" if seed == 0 else "fail_on_recompile"):
            found = compiled(layer, step)
        torch.testing.assert_close(found, own.stored(step[1].view(-1, KV, D)))


def test_buffers_are_of_the_module_and_no_weights() -> None:
    layer = ToyAttention()
    assert transform_of(layer) is None
    own = transform()
    centre(layer, CentredToy, own, torch.empty(0, dtype=torch.bfloat16))
    assert {name for name, _ in layer.named_buffers()} == {
        f"centring_{name}" for name in ("scale", "inverse", "offset", "along", "keys", "queries")
    }
    assert not layer.state_dict()
    assert all(buffer.dtype == torch.bfloat16 for buffer in layer.buffers())
    found = transform_of(layer)
    assert found is not None
    assert torch.equal(found.scale, own.scale)
    assert torch.equal(found.center, own.center.bfloat16().float())


@pytest.mark.parametrize("make", ["plain", "paired"])
def test_policies_read_the_models_keys(make: str) -> None:
    """Keys of whole layers and of one head; values, moves and the raw views are untouched."""
    layers = make_layers(make)
    plain = CacheViews(layers, B)
    blocks, generator = (5, 2, 7), torch.Generator().manual_seed(2)
    transforms = [
        KeyTransform(2.0 ** torch.randint(-2, 3, (K, 16), generator=generator), torch.randn(K, 16) * 9),
        None,
    ]
    views = plain.restoring(transforms)
    book = Book.write(layers, blocks, 19)
    for n, own in enumerate(transforms):
        keys, values = book.tokens[n]
        want = keys if own is None else keys * own.scale[:, None] + own.center[:, None]
        table = views.block_ids(blocks)
        torch.testing.assert_close(views.read(n, table, 19, 0), want)
        assert torch.equal(views.read(n, table, 19, 1), values)
        assert torch.equal(plain.read(n, table, 19, 0), keys)
        stored = views.layouts[n].gather(0, table, 19)[1:]
        torch.testing.assert_close(views.layers[n].plain(stored, 0, slice(1, 2)), want[1:])
    kept = torch.arange(0, 19, 2)[None, None]
    views.compact(kept, views.block_ids(blocks), views.block_ids((1, 3)))
    book.keep(kept)
    book.check(plain, (1, 3))
