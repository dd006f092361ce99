"""The quota of a segment: which tokens get it, and that no region dies out."""

import dataclasses

import pytest
import torch
from compression_oracles import layer_facts, layer_view, model_facts, noise
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.segments import Segments
from kvreclaim.compression.policy import CompressionPolicy, LayerSignals
from kvreclaim.compression.registry import make_policy
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.key_source import DenseSource


@dataclasses.dataclass(frozen=True)
class Given(CompressionPolicy):
    """Scores that are the first channel of the keys."""

    name = "given"

    def score(self, view):
        return view.keys[..., 0]


def kept_by(scores, positions, logical_len, budget, *, protected=(0, 0), **options):
    """The tokens of one head that stay, by the scores of segments(given, ...)."""
    keys = torch.tensor(scores)[None, :, None].repeat(1, 1, 2)
    facts = dataclasses.replace(layer_facts(head_dim=2), num_kv_heads=1)
    view = layer_view(facts, None, num_tokens=len(scores), logical_len=logical_len)
    view = dataclasses.replace(
        view,
        source=DenseSource(keys, keys),
        candidates=slice(protected[0], len(scores) - protected[1]),
        budget=budget,
        signals=LayerSignals(positions=torch.tensor([positions], dtype=torch.int32)),
    )
    found = Segments(Given(), **options).rerank(view, Given().score(view))[0, view.candidates]
    free = budget - sum(protected)
    return sorted(protected[0] + j for j in found.argsort(descending=True, stable=True)[:free].tolist())


def naive(scores, segment, free, share):
    """Turn after turn, a token at a time; then the best of the rest."""
    groups = {s: sorted((-x, j) for j, x in enumerate(scores) if segment[j] == s) for s in set(segment)}
    kept = []
    while len(kept) < int(share * free):
        turn = sorted(group.pop(0) for group in groups.values() if group)
        kept += [j for _, j in turn]
    kept = kept[: int(share * free)]
    rest = sorted((-x, j) for j, x in enumerate(scores) if j not in kept)
    return sorted(kept + [j for _, j in rest[: free - len(kept)]])


def test_protected_tokens_take_no_quota():
    scores = [50.0, 1.0, 2.0, 3.0, 4.0, 60.0]
    assert kept_by(scores, range(6), 6, 4, protected=(1, 1), n=2, share=1) == [2, 4]


@given(
    scores=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40),
    data=st.data(),
    n=st.integers(1, 9),
    share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
def test_equals_a_loop(scores, data, n, share):
    logical_len = data.draw(st.integers(len(scores), 80))
    positions = sorted(data.draw(st.permutations(range(logical_len)))[: len(scores)])
    budget = data.draw(st.integers(1, len(scores)))
    found = kept_by(scores, positions, logical_len, budget, n=n, share=share)
    assert found == naive(scores, [p * n // logical_len for p in positions], budget, share)


def held_after_many_passes(policy):
    """Positions that stay, [K, 40], of 440 tokens whose keys grow: 40 are kept at every eighth token."""
    facts = model_facts(1)
    compressor = Compressor(CompressionConfig(policy, budget=40, sinks=0, recent=4), facts)
    keys = noise(0, 2, 440, 8) * torch.linspace(0.1, 10, 440)[:, None]
    held = torch.arange(40).expand(2, -1)
    for end in range(48, 441, 8):
        held = torch.cat([held, torch.arange(end - 8, end).expand(2, -1)], dim=1)
        rows = keys.gather(1, held[..., None].expand(-1, -1, 8))
        source, signals = DenseSource(rows, rows), LayerSignals(positions=held.int())
        kept = compressor.choose(lambda _, s=source: s, 48, 0, end, signals=lambda _, s=signals: s)
        held = held.gather(1, kept[0])
    return held


def test_no_region_dies_out_over_many_passes():
    for row in held_after_many_passes("segments(knorm(keep=large), share=1)"):
        assert torch.bincount(row * 8 // 440, minlength=8).min() >= 1
    for row in held_after_many_passes("knorm(keep=large)"):
        assert torch.bincount(row * 8 // 440, minlength=8).min() == 0


@pytest.mark.parametrize("inner", ["full", "quest", "paged_eviction", "streaming_llm(positions=cache)"])
def test_refuses_what_ranks_no_tokens_by_position(inner):
    name = make_policy(inner).name
    with pytest.raises(InvalidArgumentError, match=rf"segments\({name}\) is refused: {name} "):
        make_policy(f"segments({inner})")
