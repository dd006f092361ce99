"""Attention of given queries over the live keys, against loops."""

import dataclasses

import pytest
import torch
from compression_oracles import attention_rows, layer_facts, layer_view, noise, with_kv

from kvreclaim.compression.attention import attention, over_group, window_attention, window_sums, with_window
from kvreclaim.ops import native, reference
from kvreclaim.ops.key_source import PagedSource
from kvreclaim.ops.kv_cache import PagedTokens

SPECIAL = {
    "plain": {},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": noise(40, 4)},
    "window": {"window": 4},
    "all": {"softcap": 1.5, "sinks": noise(41, 4), "window": 6},
}


def a_view(fields=None, **shape):
    facts = layer_facts()
    softmax = dataclasses.replace(facts.softmax, **(fields or {}))
    return layer_view(dataclasses.replace(facts, softmax=softmax), None, **shape)


def without_positions(view):
    return dataclasses.replace(view, signals=dataclasses.replace(view.signals, positions=None))


@pytest.mark.parametrize("fields", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("known", [True, False])
def test_equals_the_loop(fields, known):
    view = a_view(fields)
    view = view if known else without_positions(view)
    queries = view.signals.queries
    expected = attention_rows(view, queries, view.logical_len - 3)
    torch.testing.assert_close(window_attention(view).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_window_as_long_as_the_text_is_causal_attention():
    view = a_view(num_tokens=6, logical_len=6)
    queries = noise(50, 4, 6, 8)
    view = dataclasses.replace(view, signals=dataclasses.replace(view.signals, queries=queries))
    keys = view.keys.repeat_interleave(2, dim=0)
    values = torch.eye(6).expand(4, -1, -1)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    torch.testing.assert_close(window_attention(view), expected)


def test_queries_to_come_see_every_key_until_it_leaves_the_window():
    view = a_view({"window": 3})
    rows = attention(view, view.keys, noise(51, 4, 4, 8), view.logical_len)
    seen = [[j for j in range(9) if rows[0, r, j] > 0] for r in range(4)]
    assert seen == [[7, 8], [8], [], []]
    assert rows.isfinite().all()


def test_half_precision_is_widened_first():
    view = a_view()
    half = with_kv(view, keys=view.keys.bfloat16())
    same = with_kv(view, keys=view.keys.bfloat16().float())
    assert window_attention(half).dtype == torch.float32
    assert torch.equal(window_attention(half), window_attention(same))


@pytest.fixture(params=[reference, native], ids=lambda backend: backend.NAME)
def in_blocks(request):
    """Views of one layer with their tokens in blocks of one cache, in any order."""

    def move(views):
        layer = dataclasses.replace(views[0].facts, rope=None)
        cache = request.param.allocate((layer,), 16, 16, like=views[0].keys)
        free, moved = torch.randperm(16, generator=torch.Generator().manual_seed(5)), []
        for view in views:
            count = view.source.shape[1]
            ids, free = free[: -(-count // 16)], free[-(-count // 16) :]
            slots = ids.repeat_interleave(16)[:count] * 16 + torch.arange(count) % 16
            request.param.write_kv(
                cache.layers[0], *(x.transpose(0, 1) for x in view.source.tensors()), slots
            )
            source = PagedSource(request.param, PagedTokens(cache.layers[0], ids, count))
            moved.append(dataclasses.replace(view, source=source))
        return moved

    return move


@pytest.mark.parametrize("fields", SPECIAL.values(), ids=SPECIAL)
def test_sums_over_the_window_are_those_of_its_rows_together_and_alone(fields, in_blocks):
    lengths = ((9, 40), (40, 40), (33, 90), (3, 3), (40, 50))
    views = [a_view(fields, num_tokens=n, logical_len=end, seed=n + end) for n, end in lengths]
    views = [*in_blocks([without_positions(view) for view in views[:4]]), views[4]]
    together = window_sums(views)
    for view, sums in zip(views, together, strict=True):
        assert torch.equal(sums, window_sums([view])[0])
        expected = attention_rows(view, view.signals.queries, view.logical_len - 3).sum(dim=1)
        torch.testing.assert_close(sums.double(), over_group(expected, 2, "mean"), rtol=1e-5, atol=1e-6)


def test_groups_are_neighbouring_query_heads():
    scores = torch.tensor([[1.0], [3.0], [5.0], [9.0]])
    assert over_group(scores, 2, "mean").tolist() == [[2.0], [7.0]]
    assert over_group(scores, 2, "max").tolist() == [[3.0], [9.0]]


def test_the_window_ranks_above_all_and_the_newest_first():
    assert with_window(torch.tensor([[0.5, 4.0]]), 3, bound=4.0).tolist() == [[0.5, 4.0, 5.0, 6.0, 7.0]]
