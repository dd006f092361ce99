"""Tokens per head of Ada-KV and PyramidKV: the published ones, and against a loop."""

import pytest
import torch
from compression_oracles import layer_facts, layer_view, noise
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.policies.ada_kv import AdaKV
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.pyramidkv import PyramidKV
from kvreclaim.compression.policy import CountsQuestion
from kvreclaim.compression.registry import make_policy
from kvreclaim.errors import InvalidArgumentError

PUBLISHED = torch.tensor([[9, 8, 7, 1, 0.5, 0.4], [3, 2.5, 0.3, 0.2, 0.1, 0.05]])


def counts(scores, protected, budget, alpha=0.2):
    return AdaKV(Knorm(), alpha).counts(CountsQuestion(scores, protected, budget, 0))


def naive(layer, free, alpha):
    """One layer: the safe tokens of each head, then the best of the rest one by one."""
    kept = [set(sorted(range(len(s)), key=lambda j, s=s: -s[j])[: int(alpha * free)]) for s in layer]
    rest = [(-s[j], h, j) for h, s in enumerate(layer) for j in range(len(s)) if j not in kept[h]]
    places = min(free * len(layer), sum(map(len, layer))) - sum(map(len, kept))
    for _, head, token in sorted(rest)[:places]:
        kept[head].add(token)
    return [len(head) for head in kept]


def test_published_numbers():
    assert counts([list(PUBLISHED)], 0, 3).tolist() == [[4, 2]]
    assert counts([list(PUBLISHED)], 7, 10).tolist() == [[11, 9]]


def test_layers_do_not_compete():
    scores = [[noise(h, 8) + 1000 * layer for h in range(2)] for layer in range(3)]
    assert counts(scores, 1, 5).sum(dim=1).tolist() == [10, 10, 10]


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    alpha=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_equals_a_loop_where_heads_hold_unequal_numbers(lengths, alpha, share, seed):
    scores = [noise(seed + head, length) for head, length in enumerate(lengths)]
    free = int(share * sum(lengths) / len(lengths))
    if all(int(alpha * free) <= length for length in lengths):
        found = counts([scores], 2, 2 + free, alpha)
        assert found.tolist() == [[2 + n for n in naive([s.tolist() for s in scores], free, alpha)]]
    assert counts([scores], 2, 2 + free, alpha).mean().item() == pytest.approx(2 + free)


@pytest.mark.parametrize("inner", ["full", "quest", "paged_eviction", "pyramidkv", "protect(ada_kv)"])
def test_refuses_what_ranks_no_tokens_or_counts_itself(inner):
    with pytest.raises(InvalidArgumentError, match=r"ada_kv\([\w-]+\) is refused"):
        make_policy(f"ada_kv({inner})")


def counts_of_layers(lengths, protected, budget, **options):
    scores = [[torch.zeros(length) for length in layer] for layer in lengths]
    return PyramidKV(Knorm(), **options).counts(CountsQuestion(scores, protected, budget, 0))


def test_published_counts_of_layers():
    """n = 4096, half of them kept beside a window of 32, 32 layers."""
    found = counts_of_layers([[4064] * 2] * 32, 32, 2048 + 32) - 32
    rounded = found.round().long()
    assert rounded[0].tolist() == [3994, 3994]
    assert rounded[-1].tolist() == [102, 102]
    assert found.mean().item() == pytest.approx(2048, abs=1e-9)
    steps = found[:, 0].diff()
    torch.testing.assert_close(steps, steps[:1].expand(31))


def test_the_first_layer_keeps_no_more_than_it_has():
    found = counts_of_layers([[300]] * 5, 10, 10 + 200)[:, 0] - 10
    assert found.tolist() == pytest.approx([300, 250, 200, 150, 100])


def test_steepness():
    assert counts_of_layers([[100]] * 3, 0, 60, beta=1).flatten().tolist() == pytest.approx([60, 60, 60])
    assert counts_of_layers([[900]] * 3, 0, 60, beta=2).flatten().tolist() == pytest.approx([90, 60, 30])


def test_one_layer_has_the_budget():
    assert counts_of_layers([[50, 50]], 2, 12).tolist() == [[12.0, 12.0]]


def test_later_passes_take_from_all_what_a_short_layer_lacks():
    """By depth 190, 100, 10; the last layer holds 4 tokens and the first 150."""
    found = counts_of_layers([[150], [400], [4]], 0, 100).flatten()
    assert found.tolist() == pytest.approx([150, 146, 4])


@given(
    lengths=st.lists(st.lists(st.integers(0, 60), min_size=2, max_size=2), min_size=1, max_size=6),
    protected=st.integers(0, 5),
    share=st.floats(0, 1),
)
def test_the_mean_is_the_budget_and_no_head_gives_what_it_lacks(lengths, protected, share):
    limit = torch.tensor(lengths, dtype=torch.float64)
    budget = protected + int(share * float(limit.mean()))
    found = counts_of_layers(lengths, protected, budget)
    assert found.mean().item() == pytest.approx(budget, abs=1e-6)
    assert ((found >= protected) & (found <= protected + limit)).all()


def test_scores_are_those_it_wraps():
    view = layer_view(layer_facts(), None)
    assert torch.equal(PyramidKV(Knorm()).score(view), Knorm().score(view))
    assert make_policy("pyramidkv").inner == make_policy("snapkv")


UNFIT = [
    "full",
    "quest",
    "paged_eviction",
    "ada_kv",
    "pyramidkv",
    "streaming_llm(positions=cache)",
]


@pytest.mark.parametrize("inner", UNFIT)
def test_refuses_what_it_cannot_count(inner):
    name = make_policy(inner).name
    with pytest.raises(InvalidArgumentError, match=rf"pyramidkv\({name}\) is refused: {name} "):
        make_policy(f"pyramidkv({inner})")
