"""A policy bound to a model: protection, windows, statistics."""

import dataclasses

import pytest
import torch
from compression_oracles import TENSORS, model_facts, noise, query_stats
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression import registry
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policy import CompressionPolicy, Mode
from kvreclaim.compression.registry import make_policy
from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.schedule import EvictionMethod, Footprint

FACTS = model_facts()


def kv(num_tokens, calls=None):
    def layer_source(layer):
        if calls is not None:
            calls.append(layer)
        return DenseSource(noise(layer, 2, num_tokens, 8), noise(layer + 50, 2, num_tokens, 8))

    return layer_source


def knorm(facts=FACTS, **fields):
    return Compressor(CompressionConfig("knorm", options={"keep": "large"}, **fields), facts)


def rows(kept):
    return [row.tolist() for row in kept.flatten(0, 1)]


class TestStatistics:
    @pytest.mark.parametrize("policy", ["query_mixture", "triattention"])
    def test_are_required(self, policy):
        with pytest.raises(InvalidArgumentError, match="run `kvreclaim calibrate`"):
            Compressor(CompressionConfig(policy), FACTS)

    @pytest.mark.parametrize("policy", ["knorm", "streaming_llm", "full"])
    def test_are_not_required_of_the_others(self, policy):
        Compressor(CompressionConfig(policy), FACTS)

    def test_come_from_the_argument_the_config_or_its_file(self, tmp_path):
        stats = query_stats(FACTS)
        stats.save(tmp_path / "s.safetensors")
        config = CompressionConfig("query_mixture", budget=6, sinks=1, recent=2)
        given_each_way = [
            Compressor(config, FACTS, stats),
            Compressor(dataclasses.replace(config, stats=stats), FACTS),
            Compressor(dataclasses.replace(config, stats=tmp_path / "s.safetensors"), FACTS),
        ]
        kept = [compressor.choose(kv(9), 9, 0, 9) for compressor in given_each_way]
        assert torch.equal(kept[0], kept[1])
        assert torch.equal(kept[0], kept[2])

    def test_of_another_model_are_refused(self):
        with pytest.raises(StatsMismatchError, match="layers 2, the model has 3"):
            Compressor(CompressionConfig("triattention"), FACTS, query_stats(model_facts(2)))

    def test_without_centres_do_for_the_published_score_only(self):
        stats = query_stats(FACTS, 0)
        Compressor(CompressionConfig("triattention"), FACTS, stats)
        with pytest.raises(InvalidArgumentError, match="calibrate` for this model with centres"):
            Compressor(CompressionConfig("query_mixture"), FACTS, stats)

    def test_of_each_layer_serve_any_number_of_compressors(self):
        stats = query_stats(FACTS)
        ready = tuple(stats.layer(n) for n in range(3))
        config = CompressionConfig("query_mixture", budget=6, sinks=1, recent=2, stats="absent.safetensors")
        compressor = Compressor(config, FACTS, ready)
        assert all(compressor.stats_of(n) is ready[n] for n in range(3))
        kept = Compressor(dataclasses.replace(config, stats=stats), FACTS).choose(kv(12), 12, 0, 12)
        assert torch.equal(compressor.choose(kv(12), 12, 0, 12), kept)
        assert Compressor(CompressionConfig("knorm"), FACTS, ready).stats_of(0) is None

    @pytest.mark.parametrize(
        ("policy", "message"),
        [("query_mixture", "centres, and those of 'toy' hold none"), ("expected_attention", "--covariance")],
    )
    def test_of_each_layer_must_hold_what_the_policy_needs(self, policy, message):
        stats = query_stats(FACTS, 0, covariance=False)
        ready = tuple(stats.layer(n) for n in range(3))
        Compressor(CompressionConfig("triattention"), FACTS, ready)
        with pytest.raises(InvalidArgumentError, match=message):
            Compressor(CompressionConfig(policy), FACTS, ready)

    @pytest.mark.parametrize("unknown", ["problem", "layer"])
    def test_need_a_known_rotation(self, unknown):
        stats = query_stats(FACTS)
        if unknown == "problem":
            facts, reason = dataclasses.replace(FACTS, rope_problem="dynamic NTK"), "dynamic NTK"
        else:
            bare = dataclasses.replace(FACTS.layers[1], rope=None)
            facts, reason = dataclasses.replace(FACTS, layers=(FACTS.layers[0], bare)), "layer 1"
        with pytest.raises(InvalidArgumentError, match=reason):
            Compressor(CompressionConfig("query_mixture"), facts, stats)
        Compressor(CompressionConfig("knorm"), facts, stats)

    def test_reach_each_layer(self):
        """Exchanging two layers' statistics and keys exchanges what they keep."""
        stats = query_stats(FACTS)
        order = [1, 0, 2]
        swapped = QueryStats(*(getattr(stats, name)[order] for name in TENSORS), metadata=stats.metadata)
        config = CompressionConfig("query_mixture", budget=6, sinks=1, recent=2)
        kept = Compressor(config, FACTS, stats).choose(kv(12), 12, 0, 12)
        other = Compressor(config, FACTS, swapped).choose(lambda n: kv(12)(order[n]), 12, 0, 12)
        assert torch.equal(other, kept[order])


class TestChoose:
    def test_properties(self):
        compressor = knorm(budget=300)
        assert compressor.eviction_method is EvictionMethod.COMPACT
        assert compressor.budget == 300
        assert compressor.mode is Mode.PER_LAYER_HEAD
        assert knorm(mode="union").mode is Mode.UNION

    @pytest.mark.parametrize(
        ("mode", "shape"), [("union", (1, 1, 6)), ("per_head", (1, 2, 6)), ("per_layer_head", (3, 2, 6))]
    )
    def test_each_layer_is_read_once_and_modes_share(self, mode, shape):
        calls = []
        kept = knorm(budget=6, sinks=1, recent=2, mode=mode).choose(kv(12, calls), 12, 0, 12)
        assert calls == [0, 1, 2]
        assert kept.shape == shape

    def test_keeps_the_best_of_each_layer_and_head(self):
        kept = knorm(budget=6, sinks=1, recent=2).choose(kv(12), 12, 0, 12)
        for layer in range(3):
            norms = kv(12)(layer).keys.norm(dim=-1)
            for head in range(2):
                best = (norms[head, 1:10].argsort(descending=True)[:3] + 1).tolist()
                assert kept[layer, head].tolist() == sorted([0, 10, 11, *best])

    def test_full_keeps_everything_and_reads_nothing(self):
        calls = []
        compressor = Compressor(CompressionConfig("full", budget=6, sinks=1, recent=2), FACTS)
        assert rows(compressor.choose(kv(12, calls), 12, 0, 12)) == [list(range(12))]
        assert calls == []

    def test_repeats_exactly(self):
        compressor = Compressor(
            CompressionConfig("query_mixture", budget=6, sinks=1, recent=2), FACTS, query_stats(FACTS)
        )
        assert torch.equal(compressor.choose(kv(12), 12, 0, 40), compressor.choose(kv(12), 12, 0, 40))

    @pytest.mark.parametrize(
        "policy",
        ["query_mixture", "triattention", "expected_attention", "knorm", "keydiff", "lagkv", "random"],
    )
    def test_no_result_is_waited_for(self, policy):
        """On a device without data, whatever had to be read would fail."""
        device = torch.device("meta")
        options = {"lag": 2} if policy == "lagkv" else {}
        config = CompressionConfig(policy, budget=8, sinks=1, recent=2, options=options)
        compressor = Compressor(config, dataclasses.replace(FACTS, device=device), query_stats(FACTS))
        source = DenseSource(torch.empty(2, 12, 8, device=device), torch.empty(2, 12, 8, device=device))
        found = []
        assert compressor.choose(lambda _: source, 12, 0, 12, check=found.append).shape[-1] == 8
        assert [flag.device for flag in found] == [device]

    def test_a_policy_of_wrong_shape_is_named(self, monkeypatch):
        @dataclasses.dataclass(frozen=True)
        class Sloppy(CompressionPolicy):
            name = "sloppy"

            def score(self, view):
                return view.keys.norm(dim=-1).double()

        monkeypatch.setattr(registry, "_BUILT_IN", {"sloppy": Sloppy})
        compressor = Compressor(CompressionConfig("sloppy", budget=6, sinks=1, recent=2), FACTS)
        with pytest.raises(InvalidArgumentError, match=r"sloppy scored layer 0 with torch\.float64"):
            compressor.choose(kv(12), 12, 0, 12)

    def test_scores_count_candidates_only(self):
        """A protected prompt is no candidate; one too long for the budget is."""
        seen = []

        class Watching(make_policy("knorm").__class__):
            def score(self, view):
                seen.append(view.candidates)
                return super().score(view)

        for prompt, protect in [(4, True), (4, False), (9, True)]:
            compressor = knorm(budget=6, sinks=1, recent=2, protect_prompt=protect)
            compressor.policy = Watching()
            compressor.choose(kv(12), 12, prompt, 12)
        assert seen[::3] == [slice(4, 10), slice(1, 10), slice(1, 10)]


class TestProtection:
    def test_tiers(self):
        compressor = knorm(budget=6, sinks=2, recent=3, protect_prompt=True)
        assert compressor.tiers(10, 5).tolist() == [2, 2, 1, 1, 1, 0, 0, 2, 2, 2]
        assert compressor.tiers(10, 9).tolist() == [2, 2, 1, 1, 1, 1, 1, 2, 2, 2]
        assert compressor.tiers(2, 2).tolist() == [2, 2]
        assert knorm(budget=6, sinks=2, recent=3).tiers(8, 5).tolist() == [2, 2, 0, 0, 0, 2, 2, 2]
        assert knorm(budget=6, sinks=0, recent=0).tiers(3, 2).tolist() == [0, 0, 0]

    def test_a_prompt_longer_than_the_budget_leaves_the_newest_tokens(self):
        compressor = knorm(budget=8, sinks=2, recent=3, protect_prompt=True)
        for row in rows(compressor.choose(kv(20), 20, 12, 20)):
            assert {0, 1, 17, 18, 19} <= set(row)
            assert all(slot < 12 for slot in row[:5])

    @given(
        sinks=st.integers(0, 4),
        recent=st.integers(0, 5),
        over=st.integers(1, 6),
        sizes=st.tuples(st.integers(1, 30), st.integers(0, 30)),
    )
    def test_prompt_slots_left_are_those_selected_in_every_head(self, sinks, recent, over, sizes):
        num_tokens, prompt = sizes[0], min(sizes)
        compressor = knorm(budget=sinks + recent + over, sinks=sinks, recent=recent, protect_prompt=True)
        left = compressor.config.footprint(Footprint()).kept_prompt(num_tokens, prompt, compressor.budget)
        for row in rows(compressor.choose(kv(num_tokens), num_tokens, prompt, num_tokens)):
            assert sum(slot < prompt for slot in row) == left
            assert sorted(row)[:left] == row[:left]

    def test_an_unprotected_prompt_has_no_common_count(self):
        footprint = knorm(budget=6, sinks=1, recent=2).config.footprint(Footprint())
        assert footprint.kept_prompt(6, 4, 6) == 4
        assert footprint.kept_prompt(7, 4, 6) == 0


class TestSlidingLayers:
    MIXED = model_facts(windows=(None, 5, None))
    SLIDING = model_facts(windows=(4, 6))

    def test_keep_what_their_window_still_sees(self):
        kept = knorm(self.MIXED, budget=6, sinks=1, recent=2).choose(kv(12), 12, 0, 12)
        plain = knorm(budget=6, sinks=1, recent=2).choose(kv(12), 12, 0, 12)
        assert torch.equal(kept[[0, 2]], plain[[0, 2]])
        assert rows(kept[1:2]) == [[0, 1, 8, 9, 10, 11]] * 2

    @pytest.mark.parametrize("mode", ["union", "per_head"])
    def test_do_not_vote_beside_full_ones(self, mode):
        calls = []
        fields = {"budget": 6, "sinks": 1, "recent": 2, "mode": mode}
        kept = knorm(self.MIXED, **fields).choose(kv(12, calls), 12, 0, 12)
        assert calls == [0, 2]
        two = knorm(model_facts(2), **fields).choose(lambda n: kv(12)(2 * n), 12, 0, 12)
        assert torch.equal(kept, two)

    @pytest.mark.parametrize("mode", ["union", "per_head"])
    def test_vote_alone_with_the_widest_window(self, mode):
        kept = knorm(self.SLIDING, budget=6, sinks=1, recent=2, mode=mode).choose(kv(14), 14, 0, 14)
        assert all(row[1:] == [9, 10, 11, 12, 13] for row in rows(kept))

    def test_positions_decide_where_slots_have_been_evicted(self):
        """At L = 21 a window of 5 sees 17 to 20: of head 0 slot 6 alone, of head 1 slots 3 to 6."""
        positions = torch.tensor([[0, 1, 2, 3, 4, 5, 20], [10, 15, 16, 17, 18, 19, 20]])
        compressor = knorm(self.MIXED, budget=4, sinks=0, recent=1)
        older_is_larger = torch.arange(7.0, 0.0, -1.0)[:, None].expand(2, 7, 8)
        kept = compressor.choose(
            lambda _: DenseSource(older_is_larger, older_is_larger), 7, 0, 21, positions=positions[None]
        )
        assert rows(kept[1:2]) == [[0, 1, 2, 6], [3, 4, 5, 6]]

    def test_without_positions_only_what_must_be_out_is_out(self):
        """T = 7 slots at L = 21: slot 2 lies at 16 at the latest, the last position out of a window of 5."""
        kept = knorm(self.MIXED, budget=5, sinks=0, recent=1).choose(kv(7), 7, 0, 21)
        assert rows(kept[1:2]) == [[0, 3, 4, 5, 6]] * 2
