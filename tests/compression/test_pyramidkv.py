"""PyramidKV's counts: the published ones, and the mean whatever the heads hold."""

import pytest
import torch
from compression_oracles import layer_facts, layer_view
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.pyramidkv import PyramidKV
from kvreclaim.compression.policy import CountsQuestion
from kvreclaim.compression.registry import make_policy
from kvreclaim.errors import InvalidArgumentError


def counts(lengths, protected, budget, **options):
    scores = [[torch.zeros(length) for length in layer] for layer in lengths]
    return PyramidKV(Knorm(), **options).counts(CountsQuestion(scores, protected, budget, 0))


def test_published_numbers():
    """n = 4096, half of them kept beside a window of 32, 32 layers."""
    found = counts([[4064] * 2] * 32, 32, 2048 + 32) - 32
    rounded = found.round().long()
    assert rounded[0].tolist() == [3994, 3994]
    assert rounded[-1].tolist() == [102, 102]
    assert found.mean().item() == pytest.approx(2048, abs=1e-9)
    steps = found[:, 0].diff()
    torch.testing.assert_close(steps, steps[:1].expand(31))


def test_the_first_layer_keeps_no_more_than_it_has():
    found = counts([[300]] * 5, 10, 10 + 200)[:, 0] - 10
    assert found.tolist() == pytest.approx([300, 250, 200, 150, 100])


def test_steepness():
    assert counts([[100]] * 3, 0, 60, beta=1).flatten().tolist() == pytest.approx([60, 60, 60])
    assert counts([[900]] * 3, 0, 60, beta=2).flatten().tolist() == pytest.approx([90, 60, 30])


def test_one_layer_has_the_budget():
    assert counts([[50, 50]], 2, 12).tolist() == [[12.0, 12.0]]


def test_later_passes_take_from_all_what_a_short_layer_lacks():
    """By depth 190, 100, 10; the last layer holds 4 tokens and the first 150."""
    found = counts([[150], [400], [4]], 0, 100).flatten()
    assert found.tolist() == pytest.approx([150, 146, 4])


@given(
    lengths=st.lists(st.lists(st.integers(0, 60), min_size=2, max_size=2), min_size=1, max_size=6),
    protected=st.integers(0, 5),
    share=st.floats(0, 1),
)
def test_the_mean_is_the_budget_and_no_head_gives_what_it_lacks(lengths, protected, share):
    limit = torch.tensor(lengths, dtype=torch.float64)
    budget = protected + int(share * float(limit.mean()))
    found = counts(lengths, protected, budget)
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
