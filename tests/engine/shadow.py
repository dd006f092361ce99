"""A shadow of the engine: keeps every key and value it ever saw at its logical position, follows what
each compression chose to keep, and answers each attention call with plain attention over just that."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvreclaim import LLM
from kvreclaim.engine.core.request import Scheduled, Sequence
from kvreclaim.engine.execute import runner as runner_module
from kvreclaim.engine.ways.job import Done
from kvreclaim.model.attention import AttentionCall, LatentCall
from kvreclaim.ops.formats.codecs import round_trip


@dataclass
class History:
    """One sequence: k, v per layer [K, T, D] by logical position; live [L, K, n] positions attended, or
    heads[layer][head] [n] where heads keep unequal numbers."""

    k: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    live: Tensor | None = None
    heads: list[list[Tensor]] | None = None

    def attended(self, layer: int) -> list[Tensor]:
        """[n] positions per head, those of this step not included."""
        assert self.live is not None
        return list(self.live[layer]) if self.heads is None else self.heads[layer]


class Shadow:
    """Watches one LLM (prefix caching off) through pytest's monkeypatch; compares on every call.

    What it remembers is what the format of the cache makes of a token, by the codecs of ops/formats.
    """

    def __init__(self, llm: LLM, monkeypatch) -> None:
        self.facts = llm.loaded.facts
        self.cache = llm.engine.runner.cache
        self.histories: dict[int, History] = {}
        self.worst = 0.0
        self.num_calls = 0
        self.num_expanded = 0
        self.num_passes = 0
        self._step: list[Scheduled] = []
        self._watch_runner(llm, monkeypatch)
        self._watch_compression(llm, monkeypatch)

    def _watch_runner(self, llm: LLM, monkeypatch) -> None:
        forward = llm.engine.runner.forward
        attend, attend_latent = runner_module.PagedKVBatch.attend, runner_module.PagedKVBatch.attend_latent

        def watched_forward(step):
            self._step = step
            result = forward(step)
            for item in step:
                self._extend_live(item)
            return result

        def watched_attend(batch, call):
            out = attend(batch, call)
            self._compare(call, out)
            return out

        def watched_attend_latent(batch, call):
            before = self.num_calls
            out = attend_latent(batch, call)
            if self.num_calls == before:
                self.num_expanded += 1
                self._compare(call.absorbed(), out, call)
            return out

        monkeypatch.setattr(llm.engine.runner, "forward", watched_forward)
        monkeypatch.setattr(runner_module.PagedKVBatch, "attend", watched_attend)
        monkeypatch.setattr(runner_module.PagedKVBatch, "attend_latent", watched_attend_latent)

    def _watch_compression(self, llm: LLM, monkeypatch) -> None:
        run = llm.engine.compression.run

        def watched_run(jobs):
            outcomes = run(jobs)
            for job, outcome in zip(jobs, outcomes, strict=True):
                if isinstance(outcome, Done):
                    self._follow(self.histories[job.seq.seq_id], outcome)
            return outcomes

        monkeypatch.setattr(llm.engine.compression, "run", watched_run)

    def _follow(self, history: History, done: Done) -> None:
        assert history.live is not None
        if isinstance(done.kept, Tensor):
            history.live = history.live.take_along_dim(done.kept.expand(*history.live.shape[:2], -1), -1)
        else:
            history.heads = [
                [old[kept] for old, kept in zip(history.attended(layer), rows, strict=True)]
                for layer, rows in enumerate(done.kept)
            ]
        self.num_passes += 1

    def _extend_live(self, item: Scheduled) -> None:
        history = self.histories[item.seq.seq_id]
        start = item.seq.num_computed
        new = torch.arange(start, start + item.num_tokens)
        new = new.expand(self.facts.num_layers, self.facts.layers[0].num_kv_heads, -1)
        if history.live is None or start == 0:
            history.live = new
        else:
            history.live = torch.cat([history.live, new], -1)
        if start == 0:
            history.heads = None
        if history.heads is not None:
            history.heads = [[torch.cat([old, new[0, 0]]) for old in rows] for rows in history.heads]

    def _compare(self, call: AttentionCall, out: Tensor, latent: LatentCall | None = None) -> None:
        """latent: what the layer asked for where out is already that of the model's own heads."""
        row = 0
        for item in self._step:
            rows = slice(row, row + item.num_tokens)
            row += item.num_tokens
            history = self._remember(item, call, rows)
            expected = self._attend(item, history, call, rows)
            if latent is not None:
                expected = latent.weights.to(torch.float64).finish(expected)
            self.worst = max(self.worst, float((out[rows].double() - expected).abs().max()))
        self.num_calls += 1

    def _remember(self, item: Scheduled, call: AttentionCall, rows: slice) -> History:
        """Add this step's keys; a fork starts from its parent's history."""
        seq, start = item.seq, item.seq.num_computed
        if seq.seq_id not in self.histories:
            self.histories[seq.seq_id] = self._inherited(seq)
        history = self.histories[seq.seq_id]
        for store, new in zip((history.k, history.v), self._stored(call.k[rows], call.v[rows]), strict=True):
            new = new.transpose(0, 1).double()
            old = store.get(call.layer, new[:, :0])[:, :start]
            assert old.shape[1] == start, f"sequence {seq.seq_id} starts at {start}, seen {old.shape[1]}"
            store[call.layer] = torch.cat([old, new], 1)
        return history

    def _stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache makes of keys [T, K, D] and values [T, K, Dv]."""
        assert not self.cache.format.has_open_blocks, "its codes depend on how tokens lie in blocks"
        if not self.cache.shape.latent:
            return round_trip(self.cache.format, k, v)
        k, v = round_trip(self.cache.format, k[..., v.shape[-1] :], v)
        return torch.cat((v, k), -1), v

    def _inherited(self, seq: Sequence) -> History:
        parent = self.histories.get(seq.request.sequences[0].seq_id)
        if parent is None or seq.num_computed == 0:
            return History()
        assert parent.live is not None
        heads = None if parent.heads is None else [list(rows) for rows in parent.heads]
        return History(dict(parent.k), dict(parent.v), parent.live.clone(), heads)

    def _attend(self, item: Scheduled, history: History, call: AttentionCall, rows: slice) -> Tensor:
        """[T, H, Dv] fp64: attention over the kept tokens at their original positions."""
        probs = self._probabilities(item, history, call, rows)
        out = torch.einsum("kgts,ksd->kgtd", probs, history.v[call.layer])
        return out.flatten(0, 1).transpose(0, 1)

    def _probabilities(self, item: Scheduled, history: History, call: AttentionCall, rows: slice) -> Tensor:
        """[K, G, T, positions] fp64."""
        start, layer = item.seq.num_computed, call.layer
        heads = call.k.shape[1]
        total = start + item.num_tokens
        attended = torch.zeros(heads, total, dtype=torch.bool)
        attended[:, start:] = True
        if history.live is not None and start > 0:
            for head, positions in enumerate(history.attended(layer)):
                attended[head, positions] = True
        queries = torch.arange(start, total)
        mask = attended[:, None, :] & (torch.arange(total) <= queries[:, None])
        if call.softmax.window is not None:
            mask = mask & (queries[:, None] - torch.arange(total) < call.softmax.window)
        group = call.q.shape[1] // heads
        q = call.q[rows].transpose(0, 1).double().unflatten(0, (heads, group))
        scores = torch.einsum("kgtd,ksd->kgts", q, history.k[layer]) * call.softmax.scale
        if call.softmax.softcap is not None:
            scores = call.softmax.softcap * torch.tanh(scores / call.softmax.softcap)
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        if call.softmax.sinks is not None:
            sinks = call.softmax.sinks.double().view(heads, group, 1, 1).expand(-1, -1, scores.shape[2], 1)
            scores = torch.cat([scores, sinks], -1)
        return scores.softmax(-1)[..., :total]
