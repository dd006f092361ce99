"""Ada-KV's counts: the published ones, and against a loop."""

import pytest
import torch
from compression_oracles import noise
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.policies.ada_kv import AdaKV
from kvreclaim.compression.policies.knorm import Knorm
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
