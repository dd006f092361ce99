"""Attention of given queries over the live keys, against loops."""

import dataclasses

import pytest
import torch
from compression_oracles import attention_rows, layer_facts, layer_view, noise, with_kv

from kvreclaim.compression.attention import attention, over_group, window_attention, with_window

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


def test_groups_are_neighbouring_query_heads():
    scores = torch.tensor([[1.0], [3.0], [5.0], [9.0]])
    assert over_group(scores, 2, "mean").tolist() == [[2.0], [7.0]]
    assert over_group(scores, 2, "max").tolist() == [[3.0], [9.0]]


def test_the_window_ranks_above_all_and_the_newest_first():
    assert with_window(torch.tensor([[0.5, 4.0]]), 3, bound=4.0).tolist() == [[0.5, 4.0, 5.0, 6.0, 7.0]]
