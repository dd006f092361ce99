"""Positions relative to the cache: the key in slot i is rotated to i, and the next query to its own slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import tiny
import torch
from checking import GREEDY, check_roomy, check_sibling, logprobs, tokens
from settings import assert_idle, small

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.compression import registry
from kvreclaim.compression.policy import CompressionPolicy, LayerView, Mode
from kvreclaim.engine.execute import runner as runner_module
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import reference, turning
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.rope import RopeLayout, rotate
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

CACHE = {"positions": "cache"}
FAMILIES = ["llama", "qwen3", "smollm3", "mistral", "gemma2", "deepseek-v3", "llama-yarn"]


@dataclass(frozen=True)
class Scattered(CompressionPolicy):
    """Another set for every head, with gaps, at positions relative to the cache."""

    name = "scattered"
    cache_relative = True
    default_mode = Mode.PER_LAYER_HEAD

    def score(self, view: LayerView) -> torch.Tensor:
        heads, tokens = view.source.shape
        generator = torch.Generator().manual_seed(100 * view.layer + tokens)
        return torch.rand(heads, tokens, generator=generator)


def streaming(**fields) -> CompressionConfig:
    return small("streaming_llm", options=CACHE, **fields)


@dataclass
class Unrotated:
    """One sequence's keys without their rotation and its values, per layer, in slot order: [K, n, D] fp64."""

    k: dict[int, torch.Tensor] = field(default_factory=dict)
    v: dict[int, torch.Tensor] = field(default_factory=dict)


class RelativeShadow:
    """Keeps keys as they were before rotation and rotates them to their slots whenever they are attended.

    The rotation is the one of the model's own code: x cos + rotate_half(x) sin, with its cos and sin.
    """

    def __init__(self, llm, monkeypatch) -> None:
        self.rotary = llm.loaded.model.model.rotary_emb
        self.facts = llm.loaded.facts
        self.sequences: dict[int, Unrotated] = {}
        self.worst = 0.0
        self.step = []
        forward, attend = llm.engine.runner.forward, runner_module.PagedKVBatch.attend
        backend = llm.engine.backend
        compact = backend.compact
        way = llm.engine.compression.methods[EvictionMethod.COMPACT]
        apply = way.apply
        current = []

        def watched_forward(step):
            self.step = step
            return forward(step)

        def watched_attend(batch, call):
            out = attend(batch, call)
            self.compare(call, out)
            return out

        def watched_apply(job, choice):
            current[:] = [job.seq.seq_id]
            return apply(job, choice)

        def watched_compact(cache, kept, source_ids, target_ids):
            compact(cache, kept, source_ids, target_ids)
            for store in (self.sequences[current[0]].k, self.sequences[current[0]].v):
                for layer, x in store.items():
                    slots = kept[layer if len(kept) > 1 else 0].expand(len(x), -1)
                    store[layer] = x.take_along_dim(slots[..., None], 1)

        monkeypatch.setattr(llm.engine.runner, "forward", watched_forward)
        monkeypatch.setattr(runner_module.PagedKVBatch, "attend", watched_attend)
        monkeypatch.setattr(way, "apply", watched_apply)
        monkeypatch.setattr(backend, "compact", watched_compact)

    def turn(self, x, slots, layer, sign):
        """x [K, n, D] rotated by sign * slots."""
        layout = self.facts.layers[layer].rope
        if layout.num_bands == 0:
            return x
        angle = sign * slots.double()[:, None] * layout.inv_freq
        cos, sin = (torch.cat([f, f], -1) for f in (angle.cos(), angle.sin()))
        part = x[..., layout.start : layout.start + 2 * layout.num_bands]
        first, second = part.chunk(2, -1)
        turned = part * cos + torch.cat([-second, first], -1) * sin
        return torch.cat([x[..., : layout.start], turned, x[..., layout.start + 2 * layout.num_bands :]], -1)

    def compare(self, call, out):
        row = 0
        for item in self.step:
            rows = slice(row, row + item.num_tokens)
            row += item.num_tokens
            if item.seq.num_computed == 0 and call.layer == 0:
                self.sequences[item.seq.seq_id] = Unrotated()
            mine = self.sequences[item.seq.seq_id]
            k, v = (x[rows].transpose(0, 1).double() for x in (call.k, call.v))
            old = mine.k.get(call.layer, k[:, :0])
            slots = torch.arange(old.shape[1] + item.num_tokens)
            new = slots[old.shape[1] :]
            mine.k[call.layer] = torch.cat([old, self.turn(k, new, call.layer, -1)], 1)
            mine.v[call.layer] = torch.cat([mine.v.get(call.layer, v[:, :0]), v], 1)
            keys = self.turn(mine.k[call.layer], slots, call.layer, 1)
            mask = slots <= new[:, None]
            if call.softmax.window is not None:
                mask &= new[:, None] - slots < call.softmax.window
            q = call.q[rows].transpose(0, 1).double().unflatten(0, (len(keys), -1))
            scores = torch.einsum("kgtd,ksd->kgts", q, keys) * call.softmax.scale
            if call.softmax.softcap is not None:
                scores = call.softmax.softcap * torch.tanh(scores / call.softmax.softcap)
            probs = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            found = torch.einsum("kgts,ksd->kgtd", probs, mine.v[call.layer]).flatten(0, 1).transpose(0, 1)
            self.worst = max(self.worst, float((out[rows].double() - found).abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_is_rotated_to_its_slot(family, make_llm, monkeypatch):
    options = {"block_size": 8, "max_num_batched_tokens": 32, "disable_hybrid_kv_cache_manager": True}
    llm = make_llm(family, enable_prefix_caching=False, **options)
    shadow = RelativeShadow(llm, monkeypatch)
    outputs = llm.generate(tiny.prompts((70, 9, 33), seed=3), GREEDY, streaming())
    assert [out.error for out in outputs] == [None] * 3
    assert outputs[0].metrics.compactions >= 5
    assert outputs[0].metrics.reclaim_efficiency == 1.0
    assert shadow.worst <= 2e-5
    assert_idle(llm)


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_each_head_may_keep_its_own_set(kernels, make_llm, monkeypatch):
    monkeypatch.setattr(registry, "_BUILT_IN", {**registry._BUILT_IN, "scattered": Scattered})
    llm = make_llm(enable_prefix_caching=False, max_num_batched_tokens=32, kernels=kernels)
    shadow = RelativeShadow(llm, monkeypatch)
    outputs = llm.generate(tiny.prompts((70, 33), seed=3), GREEDY, small("scattered"))
    assert outputs[0].metrics.compactions >= 5
    assert shadow.worst <= 2e-5


def test_it_is_another_model_than_original_positions(make_llm):
    prompts = tiny.prompts((70,), seed=3)
    llm = make_llm(block_size=8, max_num_batched_tokens=32)
    relative, original = (llm.generate(prompts, GREEDY, c) for c in (streaming(), small("streaming_llm")))
    assert logprobs(relative) != logprobs(original)
    assert relative[0].metrics.tokens_evicted == original[0].metrics.tokens_evicted


def test_a_length_within_the_budget_changes_no_bit(make_llm):
    check_roomy(make_llm, streaming(budget=100))


def test_preemption_forks_and_scoring(make_llm):
    prompts = tiny.prompts((20, 19, 18, 17), seed=7)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (160, 100, 100, 100)]
    configs = [None, *[streaming(interval=16)] * 3]
    calm_llm = make_llm(block_size=8, max_num_batched_tokens=32)
    calm = calm_llm.generate(prompts, params, configs)
    tight = make_llm(block_size=8, num_blocks=26, max_num_batched_tokens=32)
    crowded = tight.generate(prompts, params, configs)
    assert sum(out.metrics.preemptions for out in crowded) > 0
    assert tokens(crowded) == tokens(calm)
    scored = calm_llm.score(prompts[1:], tokens(calm)[1:], streaming(interval=16))
    assert [s.predicted for s in scored] == tokens(calm)[1:]
    forked = calm_llm.generate(
        prompts[0], SamplingParams(temperature=1.0, n=2, max_tokens=60, seed=1), streaming()
    )[0]
    assert forked.error is None
    assert_idle(calm_llm)


def test_siblings_that_share_the_prefix_do_not_notice(make_llm):
    assert check_sibling(make_llm, streaming(budget=40, interval=16)).compactions > 0


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_turning_what_moved_is_rotating_to_the_new_slot(style):
    torch.manual_seed(0)
    layout = RopeLayout(torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64), style, start=2)
    facts = LayerFacts(num_heads=2, num_kv_heads=2, head_dim=10, v_head_dim=4, softmax=Softmax(1.0))
    cache = reference.allocate((facts, facts), 6, 4, like=torch.empty(0))
    raw = torch.randn(2, 2, 12, 10, dtype=torch.float64)
    source, target = torch.tensor([5, 1, 2]), torch.tensor([1, 0])
    mapping = (source[:, None] * 4 + torch.arange(4)).flatten()
    for layer in range(2):
        rotated = rotate(raw[layer], torch.arange(12), layout).float()
        reference.write_kv(cache.layers[layer], rotated.transpose(0, 1), torch.randn(12, 2, 4), mapping)
    kept = torch.tensor([[[0, 1, 4, 9, 11], [0, 2, 3, 4, 5]], [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]])
    reference.compact(cache, kept, source, target)
    before = cache.k.clone(), cache.v.clone()
    turning.turn_moved_keys(reference, cache, kept, target, (layout, layout))
    tokens_of = [reference.gather_tokens(PagedTokens(cache.layers[layer], target, 5))[0] for layer in (0, 1)]
    for layer in range(2):
        expected = rotate(raw[layer].take_along_dim(kept[layer][..., None], 1), torch.arange(5), layout)
        torch.testing.assert_close(tokens_of[layer].double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(cache.v, before[1])
    assert torch.equal(cache.k[0, 1, 0, :2], before[0][0, 1, 0, :2])
    assert torch.equal(cache.k[:, [2, 3, 4, 5]], before[0][:, [2, 3, 4, 5]])


def test_what_cannot_be_served_is_refused(make_llm):
    with pytest.raises(InvalidArgumentError, match="segments"):
        small("segments(streaming_llm(positions=cache))")
    with pytest.raises(InvalidArgumentError, match="'positions' is 'slots'"):
        small("streaming_llm", options={"positions": "slots"})
