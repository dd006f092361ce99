"""A policy that reads queries scores as a shadow in fp64 at every pass, after many others."""

from __future__ import annotations

import pytest
import tiny
import torch
from settings import small
from signal_shadow import SignalShadow
from torch import Tensor

from kvreclaim import LLM, SamplingParams
from kvreclaim.compression.policies.snapkv import pool
from kvreclaim.compression.registry import policy_class

GREEDY = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
WINDOW = 4
OPTIONS = {"h2o": {}, "tova": {}, "snapkv": {"window": WINDOW, "kernel": 3, "group": "max"}}


class ScoreShadow(SignalShadow):
    """Works out the scores of one sequence at every pass, and compares."""

    def __init__(self, llm: LLM, monkeypatch, policy: str) -> None:
        super().__init__(llm, monkeypatch)
        self.policy = policy
        self.worst_score, self.num_scored = 0.0, 0
        self.longest_live = 0
        policy_type = policy_class(policy)
        score_many = policy_type.score_many

        def watched(policy, views):
            found = score_many(policy, views)
            for view, scores in zip(views, found, strict=True):
                ((seq_id, history),) = self.histories.items()
                want = self.scores(seq_id, view.layer, history.live[view.layer], view.logical_len)
                self.worst_score = max(self.worst_score, float(((scores - want).abs() / (1 + want)).max()))
                self.num_scored += 1
                self.longest_live = max(self.longest_live, want.shape[1])
            return found

        monkeypatch.setattr(policy_type, "score_many", watched)

    def scores(self, seq_id: int, layer: int, live: Tensor, end: int) -> Tensor:
        """[K, T] float64 of the live tokens [K, T]."""
        if self.policy == "h2o":
            return self.mass[seq_id][layer].gather(-1, live)
        heads, num_live = live.shape
        rows = self.rows(seq_id, layer, live, torch.arange(end - WINDOW, end))
        if self.policy == "tova":
            return rows[:, :, -1].mean((0, 1)).expand(heads, -1)
        sums = rows[..., :-WINDOW].sum(2)
        if num_live == end:
            sums = pool(sums.flatten(0, 1), 3, "average").unflatten(0, (heads, -1))
        return torch.cat([sums.amax(1), torch.arange(1.0, WINDOW + 1).expand(heads, -1) + WINDOW], -1)

    def rows(self, seq_id: int, layer: int, live: Tensor, at: Tensor) -> Tensor:
        """[K, G, R, T] float64: what the queries at these positions give the live keys."""
        facts, history = self.facts.layers[layer], self.histories[seq_id]
        keys = history.k[layer].take_along_dim(live[..., None], 1)
        queries = self.queries[seq_id][layer][:, at].double().unflatten(0, (len(live), -1))
        scores = torch.einsum("kgrd,ktd->kgrt", queries, keys) * facts.softmax.scale
        if facts.softmax.softcap is not None:
            scores = facts.softmax.softcap * torch.tanh(scores / facts.softmax.softcap)
        ahead = at[:, None] - live[:, None, :]
        seen = (ahead >= 0) & (ahead < (facts.softmax.window or 1 << 30))
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        if facts.softmax.sinks is not None:
            sinks = facts.softmax.sinks.double().view(len(live), -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        return scores.softmax(-1)[..., : live.shape[1]]


@pytest.mark.parametrize("policy", OPTIONS)
@pytest.mark.parametrize(
    ("family", "wrapper"),
    [
        ("llama", "{}"),
        ("mistral", "{}"),
        ("gemma2", "{}"),
        ("gpt-oss", "{}"),
        ("deepseek-v3", "{}"),
    ],
)
def test_scores_of_every_pass(family, policy, wrapper, make_llm, monkeypatch):
    options = {"block_size": 8, "max_num_batched_tokens": 16, "disable_hybrid_kv_cache_manager": True}
    llm = make_llm(family, enable_prefix_caching=False, **options)
    shadow = ScoreShadow(llm, monkeypatch, policy)
    config = small(wrapper.format(policy), budget=7, interval=4, sinks=1, recent=2, options=OPTIONS[policy])
    (out,) = llm.generate(tiny.prompts((70,), seed=3), GREEDY, config)
    assert out.error is None
    assert out.metrics.compactions > 8
    assert shadow.num_scored == out.metrics.compactions * llm.loaded.facts.num_layers
    assert shadow.longest_live > 20
    assert shadow.worst <= 1e-5
    assert shadow.worst_score <= 1e-5
