"""One contract for every registered policy, and the arithmetic of the small ones."""

import dataclasses

import pytest
import torch
from compression_oracles import layer_facts, layer_view, model_facts, noise, query_stats

from kvreclaim.compression import registry
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.segments import Segments
from kvreclaim.compression.policies.streaming_llm import StreamingLLM
from kvreclaim.compression.policy import CompressionPolicy, LayerSignals, Signal
from kvreclaim.compression.registry import make_policy
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.testing import CHECKS, check_policy

OPTIONS = (
    "knorm(keep=large)",
    "lagkv(lag=3)",
    "lagkv(lag=3, cross=true)",
    "critical(snapkv(window=2))",
    "segments(query_mixture(value_norm=false), 4)",
    "protect(paged_eviction, first=2)",
    "protect(knorm, last=4, spans=((10, 20), (35, 36)))",
    "pyramidkv(critical(keydiff), beta=3)",
    "ada_kv(keydiff, alpha=0.5)",
    "shares(critical(random), floor=0.1, by=static)",
)
POLICIES = (*registry.policy_names(), *OPTIONS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("spec", POLICIES)
def test_keeps_the_contract(spec, check):
    check(make_policy(spec))


@dataclasses.dataclass(frozen=True)
class Sound(CompressionPolicy):
    """Breaks nothing; each test below breaks one thing."""

    name = "sound"

    def score(self, view):
        return view.source.key_norms()


def broken(change):
    """A policy whose scores are those of Sound, changed."""
    return {"score": lambda self, view: change(view, Sound.score(self, view))}


BREACHES = {
    "double": (broken(lambda _, s: s.double()), "gives scores"),
    "shape": (broken(lambda _, s: s[:, :1]), "gives scores"),
    "infinite": (broken(lambda _, s: s / 0), "not finite"),
    "undefined at zero": (broken(lambda _, s: s.log()), "not finite"),
    "global generator": (broken(lambda _, s: s + torch.rand(s.shape)), "global generator|in two ways"),
    "writes": (broken(lambda view, s: s + view.source.keys.mul_(2).sum()), "in two ways|changes the view"),
    "other heads": (broken(lambda _, s: s - s.mean(dim=0)), "depend on other heads"),
    "window": ({"needs": frozenset({Signal.RECENT_QUERIES})}, "queries in a window of 0"),
    "signals": ({"needs": frozenset({"keys"})}, "needs frozenset"),
    "mode": ({"default_mode": "union"}, "default_mode is 'union'"),
    "slots": (
        {"cache_relative": True, "needs": frozenset({Signal.POSITIONS})},
        "takes slots for positions",
    ),
    "way": ({"eviction_method": "compact"}, "eviction_method is 'compact'"),
    "counts": (
        {"eviction_method": EvictionMethod.CELLS, "counts": lambda *_, **__: torch.full((3, 2), 12.0)},
        "12.0 on average",
    ),
    "bounds": (
        {"eviction_method": EvictionMethod.CELLS, "counts": lambda *_, **__: torch.tensor([[2.0, 18.0]] * 3)},
        "outside",
    ),
}


@pytest.mark.parametrize(("body", "message"), BREACHES.values(), ids=BREACHES)
def test_the_contract_catches(body, message, monkeypatch):
    cls = dataclasses.dataclass(frozen=True)(type("Broken", (Sound,), {**body, "name": "broken"}))
    monkeypatch.setattr(registry, "_BUILT_IN", {"broken": cls, "sound": Sound})
    check_policy("sound")
    check_policy(Sound())
    with pytest.raises(AssertionError, match=message):
        check_policy("broken")


@pytest.mark.parametrize(("body", "message"), [({}, None), *BREACHES.values()], ids=["sound", *BREACHES])
def test_the_contract_holds_for_objects_that_are_not_registered(body, message):
    policy = dataclasses.dataclass(frozen=True)(type("Mine", (Sound,), {**body, "name": "mine"}))()
    if message is None:
        check_policy(policy)
        check_policy(Segments(policy, n=2))
        return
    with pytest.raises(AssertionError, match=message):
        check_policy(policy)


def a_view(**shape):
    facts = model_facts()
    return layer_view(facts.layers[0], query_stats(facts).layer(0), **shape)


def test_streaming_llm_keeps_the_checked_window():
    config = CompressionConfig("streaming_llm", budget=6, sinks=2, recent=0)
    compressor = Compressor(config, model_facts())
    kept = compressor.choose(lambda _: DenseSource(noise(0, 2, 12, 8), noise(1, 2, 12, 8)), 12, 12, 12)
    assert kept.tolist() == [[[0, 1, 8, 9, 10, 11]]]


@pytest.mark.parametrize(("keep", "sign"), [("small", -1), ("large", 1)])
def test_knorm_is_the_signed_norm(keep, sign):
    view = a_view()
    torch.testing.assert_close(Knorm(keep).score(view), sign * view.keys.norm(dim=-1), rtol=2**-14, atol=0)


def test_knorm_is_published_with_small_norms_kept():
    assert Knorm().keep == "small"


def test_recency_is_exact_for_a_million_tokens():
    facts = dataclasses.replace(layer_facts(head_dim=2), num_heads=1, num_kv_heads=1)
    view = layer_view(facts, None, num_tokens=1_000_001)
    slots = dataclasses.replace(view, signals=LayerSignals())
    assert StreamingLLM().score(slots)[0, -1] == 1_000_000
    places = torch.arange(1_000_000, -1, -1, dtype=torch.int32)[None]
    moved = dataclasses.replace(view, signals=LayerSignals(positions=places))
    assert StreamingLLM().score(moved)[0, :2].tolist() == [1_000_000, 999_999]
