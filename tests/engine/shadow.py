"""A shadow of the engine: keeps every key and value it ever saw at its logical position, follows what
each compression chose to keep, and answers each attention call with plain attention over just that.

A sequence that begins with a prefix hit begins with the keys and values that were once computed exactly
for these very tokens under the same salt: what is hit and was never computed so, or is something else in the
cache, is noted in `wrong`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvreclaim import LLM
from kvreclaim.engine.compact.job import CompactionResult
from kvreclaim.engine.execute import runner as runner_module
from kvreclaim.engine.features.drops.feature import SpanDrops
from kvreclaim.engine.features.verification.feature import Verification
from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.model.attention import AttentionCall, LatentCall
from kvreclaim.ops.formats.codecs import round_trip
from kvreclaim.ops.key_transform import KeyTransform
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.schedule.budget.drops import Drop
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

AS_NEAR = 1.001
"""Factor of a token's distance from its stored value: one code farther than need be adds more, but where it
lies within some thousandths of a step of the boundary."""
SCALE_STEP = 2 ** (1 / 256) - 1
"""Share of the stored length: a scale between two codes may be stored as either."""


@dataclass
class History:
    """One sequence: k, v per layer [K, T, D] by logical position; live [L, K, n] positions attended, or
    heads[layer][head] [n] where heads keep unequal numbers; of the layers that compression is about.

    num_exact: leading tokens that are finite and were computed over all tokens before them
    chain:     of the full blocks that were noted as contents, the last one's name
    """

    k: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    live: Tensor | None = None
    heads: list[list[Tensor]] | None = None
    num_exact: float = math.inf
    num_noted: int = 0
    chain: object = None

    def copy(self) -> History:
        heads = None if self.heads is None else [list(rows) for rows in self.heads]
        live = None if self.live is None else self.live.clone()
        return replace(self, k=dict(self.k), v=dict(self.v), live=live, heads=heads)

    def attended(self, layer: int) -> list[Tensor]:
        """[n] positions per head, those of this step not included; layer: of these."""
        assert self.live is not None
        return list(self.live[layer]) if self.heads is None else self.heads[layer]


@dataclass(frozen=True)
class Content:
    """The exact keys and values of one full block, [L, K, S, D] and [L, K, S, Dv]."""

    name: int
    k: Tensor
    v: Tensor


class Shadow:
    """Watches one LLM through pytest's monkeypatch; compares on every call.

    What it remembers is what the format of the cache makes of a token, by the codecs of ops/formats.
    Sequences whose keys are turned when they move are compared up to their first pass.

    contents: full blocks by the name of the block before (at first: the salt) and their tokens
    kept:     of compressed prefixes, by key
    wrong:    prefix hits that are not what they should be, in words
    """

    def __init__(self, llm: LLM, monkeypatch) -> None:
        self.llm = llm
        self.size = llm.engine.config.block_size
        self.contents: dict[tuple[object, tuple[int, ...]], Content] = {}
        self.wrong: list[str] = []
        self.num_hits = 0
        self.facts, self.groups = llm.loaded.facts, llm.engine.groups
        self.cache = llm.engine.runner.cache
        self.histories: dict[int, History] = {}
        self.kept: dict[object, History] = {}
        self.worst = 0.0
        self.num_calls = 0
        self.num_expanded = 0
        self.num_passes = self.num_drops = 0
        self._step: list[Scheduled] = []
        self._forks_companion = False
        self._watch_memory(llm, monkeypatch)
        self._watch_runner(llm, monkeypatch)
        self._watch_compression(llm, monkeypatch)
        self._watch_drops(llm, monkeypatch)

    def _watch_memory(self, llm: LLM, monkeypatch) -> None:
        memory = llm.engine.memory
        admit, fork = memory.admit, memory.fork

        def watched_admit(seq_id, *args, **kwargs):
            self.histories.pop(seq_id, None)
            return admit(seq_id, *args, **kwargs)

        def watched_fork(parent_id, child_id, *args):
            if self._forks_companion:
                return fork(parent_id, child_id, *args)
            if parent_id not in self.histories:  # a compressed prefix that came from disk under another id
                key = llm.engine.snapshots.held[parent_id].snapshot_key
                self.histories[parent_id] = self.kept[key]
            self.histories[child_id] = self.histories[parent_id].copy()
            return fork(parent_id, child_id, *args)

        companions = llm.engine.feature(Verification).verifier.companions
        fork_companion = companions.fork

        def watched_fork_companion(*args):
            self._forks_companion = True
            fork_companion(*args)
            self._forks_companion = False

        snapshots = llm.engine.scheduler.snapshots
        keep = snapshots.keep

        def watched_keep(parent, hidden):
            is_kept, key = keep(parent, hidden), hidden.snapshot_key
            files = llm.engine.snapshots.files
            if is_kept and (files is None or not (key in files.below or key.name in files._storing)):
                self.kept[hidden.snapshot_key] = self.histories[hidden.seq_id]
            return is_kept

        monkeypatch.setattr(companions, "fork", watched_fork_companion)
        monkeypatch.setattr(snapshots, "keep", watched_keep)
        monkeypatch.setattr(memory, "admit", watched_admit)
        monkeypatch.setattr(memory, "fork", watched_fork)

    def _watch_runner(self, llm: LLM, monkeypatch) -> None:
        forward = llm.engine.runner.forward
        attend, attend_latent = runner_module.PagedKVBatch.attend, runner_module.PagedKVBatch.attend_latent

        def watched_forward(step, *, observed=True):
            self._step = step if observed else []
            if not observed:
                return forward(step, observed=False)
            for item in step:
                if item.seq.seq_id not in self.histories:
                    self.histories[item.seq.seq_id] = self._begin(item.seq)
            exact = [self.histories[item.seq.seq_id].num_exact for item in step]
            try:
                result = forward(step)
            except Exception:  # it is run again, and writes its slots again
                for item, number in zip(step, exact, strict=True):
                    self.histories[item.seq.seq_id].num_exact = number
                raise
            for item in step:
                self._extend_live(item)
                if not item.row.num_drafts:
                    self._note_contents(item, item.seq.num_computed + item.num_tokens)
            return result

        done = llm.engine.scheduler.update_from_output

        def watched_done(plan, outcome):
            problems = done(plan, outcome)
            for item in self._step:
                if item.row.num_drafts and item.seq.seq_id in self.histories:
                    self._cut(item.seq)
                    self._note_contents(item, item.seq.num_computed)
            return problems

        monkeypatch.setattr(llm.engine.scheduler, "update_from_output", watched_done)

        def watched_attend(batch, call):
            out = attend(batch, call)
            if not self._step:
                return out
            self._compare(call, out)
            return out

        def watched_attend_latent(batch, call):
            before = self.num_calls
            out = attend_latent(batch, call)
            if self.num_calls == before and self._step:
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
                if job.seq.seq_id not in llm.engine.lifecycle.sequences:
                    continue  # a companion's: what it holds only drafts
                history = self.histories[job.seq.seq_id]
                if isinstance(outcome, CompactionResult):
                    history.num_exact = min(history.num_exact, job.seq.num_computed)
                    self._follow(history, outcome)
            return outcomes

        monkeypatch.setattr(llm.engine.compression, "run", watched_run)

    def _watch_drops(self, llm: LLM, monkeypatch) -> None:
        drops = llm.engine.feature(SpanDrops)
        follow = drops.follow

        def watched_follow(seq, done):
            follow(seq, done)
            self._follow_drop(self.histories[seq.seq_id], done, seq.num_computed)

        monkeypatch.setattr(drops, "follow", watched_follow)

    def _follow(self, history: History, done: CompactionResult) -> None:
        assert history.live is not None
        if isinstance(done.kept, Tensor):
            history.live = history.live.take_along_dim(done.kept.expand(*history.live.shape[:2], -1), -1)
        else:
            history.heads = [
                [old[kept] for old, kept in zip(history.attended(layer), rows, strict=True)]
                for layer, rows in enumerate(done.kept)
            ]
        self.num_passes += 1

    def _follow_drop(self, history: History, done: Drop, num_computed: int) -> None:
        """Whole blocks of the last tokens, which all heads have alike, are gone."""
        assert history.live is not None
        slots = [entry * self.size + i - done.num_tokens for entry in done.entries for i in range(self.size)]

        def left(positions: Tensor) -> Tensor:
            stays = torch.ones(len(positions), dtype=torch.bool)
            stays[slots] = False
            return positions[stays]

        if history.heads is None:
            history.live = torch.stack([torch.stack([left(head) for head in rows]) for rows in history.live])
        else:
            history.heads = [[left(head) for head in rows] for rows in history.heads]
        history.num_exact = min(history.num_exact, num_computed)
        self.num_drops += 1

    def _begin(self, seq: Sequence) -> History:
        """The history of a sequence that has just been admitted: the tokens of its prefix hit."""
        history = History(chain=seq.cache_salt)
        if not seq.num_computed:
            return history
        self.num_hits += 1
        held, firsts = zip(*(self._held(seq, n) for n in range(self.facts.num_layers)), strict=True)
        k, v = zip(*held, strict=True)
        history.k, history.v = dict(enumerate(k)), dict(enumerate(v))
        facts = self.groups.facts
        history.live = torch.arange(seq.num_computed).expand(facts.num_layers, k[0].shape[0], -1)
        while history.num_noted < seq.num_computed:
            tokens = tuple(seq.token_ids[history.num_noted : history.num_noted + self.size])
            content = self.contents.get((history.chain, tokens))
            block = slice(history.num_noted, history.num_noted + self.size)
            hit = f"tokens {block.start} to {block.stop - 1} of {seq.num_computed}"
            where = f"{seq.request.request_id} hits {hit}"
            if content is None:
                self.wrong.append(f"{where}, which were never computed exactly")
                return history
            for every, content_of in ((k, content.k), (v, content.v)):
                for held, want, first in zip(every, content_of, firsts, strict=True):
                    off = float((held[:, block] - want).abs().max() / (want.max() - want.min()))
                    if block.start >= first and not off <= self._most_off():
                        self.wrong.append(f"{where}, which are off by {off:.3g} of their spread")
            history.num_noted, history.chain = block.stop, content.name
        return history

    def _most_off(self) -> float:
        """Two computations of the same token may differ by so much of a block's spread: in a format that
        rounds a number may fall to either side of a boundary."""
        return 1e-4 if self.cache.format.name == "fp32" else 0.15

    def _held(self, seq: Sequence, layer: int) -> tuple[tuple[Tensor, Tensor], int]:
        """[K, T, D] and [K, T, Dv] fp64: what the cache holds of a sequence's computed tokens in a layer of
        the model; zeros where a window has left them behind. And the first position that it holds."""
        (k, v), first = self._there(seq.seq_id, layer, seq.num_computed)
        gone = [x.new_zeros(len(x), first, x.shape[-1]) for x in (k, v)]
        return (torch.cat([gone[0], k], 1).double(), torch.cat([gone[1], v], 1).double()), first

    def _there(self, seq_id: int, layer: int, end: int) -> tuple[tuple[Tensor, Tensor], int]:
        """Keys and values in the slots up to `end`, and the first of these that the layer's table holds."""
        memory, place = self.llm.engine.memory, self.groups.places[layer]
        ids, first = [block or 0 for block in memory.table(seq_id).block_ids], 0
        if place.table:
            window, group = self.groups.tables[place.table - 1]
            table = memory.windows[window].table(seq_id)
            parts = self.groups.parts
            ids = [block for row in table.rows for block in row[group * parts : (group + 1) * parts]]
            first = table.first * self.size
        layer_cache = self.llm.engine.runner.layers[layer]
        blocks = torch.tensor(ids[: -(-(end - first) // layer_cache.cache.block_size)], dtype=torch.int64)
        tokens = PagedTokens(layer_cache, blocks, end - first)
        return self.llm.engine.backend.gather_tokens(tokens), first

    def _cut(self, seq: Sequence) -> None:
        """Drafts that do not stand have never been there."""
        history = self.histories[seq.seq_id]
        if history.live is not None:
            history.live = history.live[..., history.live[0, 0] < seq.num_computed]
        if history.heads is not None:
            history.heads = [[old[old < seq.num_computed] for old in rows] for rows in history.heads]

    def _note_contents(self, item: Scheduled, end: int) -> None:
        """The full blocks that are now there, as far as they are exact."""
        seq = item.seq
        history = self.histories[seq.seq_id]
        compressor = seq.request.compressor
        if compressor is not None and compressor.eviction_method is EvictionMethod.READS:
            history.num_exact = min(history.num_exact, max(seq.num_prompt, compressor.budget))
        if seq.footprint.sparse is not None:
            history.num_exact = min(history.num_exact, seq.footprint.sparse_rows(seq.num_prompt).stop)
        while history.num_noted + self.size <= min(end, history.num_exact):
            block = slice(history.num_noted, history.num_noted + self.size)
            k, v = (
                torch.stack([store[layer][:, block] for layer in range(self.facts.num_layers)])
                for store in (history.k, history.v)
            )
            key = (history.chain, tuple(seq.token_ids[block]))
            content = self.contents.setdefault(key, Content(len(self.contents), k, v))
            history.num_noted, history.chain = block.stop, content.name

    def _extend_live(self, item: Scheduled) -> None:
        history = self.histories[item.seq.seq_id]
        start = item.seq.num_computed
        new = torch.arange(start, start + item.num_tokens)
        new = new.expand(self.groups.facts.num_layers, self.facts.layers[0].num_kv_heads, -1)
        history.live = new if history.live is None else torch.cat([history.live, new], -1)
        if history.heads is not None:
            history.heads = [[torch.cat([old, new[0, 0]]) for old in rows] for rows in history.heads]

    def _compare(self, call: AttentionCall, out: Tensor, latent: LatentCall | None = None) -> None:
        """latent: the call of the layer where out is already that of the model's own heads."""
        row = 0
        for item in self._step:
            rows = slice(row, row + item.num_tokens)
            row += item.num_tokens
            history = self._remember(item, call, rows)
            if _turns_keys(item.seq) and history.num_exact <= item.seq.num_computed:
                continue
            expected = self._attend(item, history, call, rows)
            if latent is not None:
                expected = latent.weights.to(torch.float64).finish(expected)
            self.worst = max(self.worst, _furthest(out[rows].double(), expected))
        self.num_calls += 1

    def _remember(self, item: Scheduled, call: AttentionCall, rows: slice) -> History:
        """Add this step's keys."""
        seq, start = item.seq, item.seq.num_computed
        history = self.histories[seq.seq_id]
        sound = call.k[rows].isfinite().flatten(1).all(-1) & call.v[rows].isfinite().flatten(1).all(-1)
        if not sound.all():
            history.num_exact = min(history.num_exact, start + int(sound.int().argmin()))
        for store, new in zip((history.k, history.v), self._written(item, call, rows), strict=True):
            new = new.transpose(0, 1).double()
            old = store.get(call.layer, new[:, :0])[:, :start]
            assert old.shape[1] == start, f"sequence {seq.seq_id} starts at {start}, seen {old.shape[1]}"
            store[call.layer] = torch.cat([old, new], 1)
        return history

    def _written(self, item: Scheduled, call: AttentionCall, rows: slice) -> tuple[Tensor, Tensor]:
        """This step's keys and values as the cache should hold them. A number between two codes may be stored
        as either, as an instruction set rounds: what is there and is as near to the token counts, up to the
        step between two scales."""
        layer, form = self.llm.engine.runner.layers[call.layer], self.cache.format
        own = layer.cache.format
        keys = layer.softmax.keys or KeyTransform(torch.ones(1, 1), torch.zeros(1, 1))
        given = keys.stored(call.k[rows]), call.v[rows]
        if own is not form:
            return round_trip(own, call.k[rows], call.v[rows])
        stored = self._stored(*given)
        if form.is_plain:
            return stored
        table = self.llm.engine.memory.table(item.seq.seq_id)
        end = table.logical_len if self.groups.places[call.layer].table else table.physical_len
        there, _ = self._there(item.seq.seq_id, call.layer, end + item.num_tokens)
        found, there = [], (keys.stored(there[0].transpose(0, 1)).transpose(0, 1), there[1])
        for token, want, held in zip(given, stored, there, strict=True):
            got = held[:, held.shape[1] - item.num_tokens :].transpose(0, 1).to(want.dtype)
            far, other = (want - token).norm(dim=-1), (got - token).norm(dim=-1)
            most = far * AS_NEAR + want.norm(dim=-1) * SCALE_STEP
            found.append(torch.where((other <= most)[..., None], got, want))
        return keys.restored(found[0].transpose(0, 1).float()).transpose(0, 1), found[1]

    def _stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [T, K, D] and values [T, K, Dv] as the cache stores them."""
        if not self.cache.shape.latent:
            return round_trip(self.cache.format, k, v)
        k, v = round_trip(self.cache.format, k[..., v.shape[-1] :], v)
        return torch.cat((v, k), -1), v

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
        place = self.groups.places[layer]
        if place.table:
            attended[:] = True  # the window's mask says the rest
        elif history.live is not None and start > 0:
            for head, positions in enumerate(history.attended(place.layer)):
                attended[head, positions] = True
        queries = torch.arange(start, total)
        mask = attended[:, None, :] & (torch.arange(total) <= queries[:, None])
        if call.softmax.window is not None:
            mask = mask & (queries[:, None] - torch.arange(total) < call.softmax.window)
        if call.softmax.chunk is not None:
            mask = mask & (
                queries[:, None] // call.softmax.chunk == torch.arange(total) // call.softmax.chunk
            )
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


def _furthest(out: Tensor, expected: Tensor) -> float:
    """The largest difference where a finite number is expected; infinite if that is no number."""
    off = (out - expected).abs()[expected.isfinite()]
    return float(off.nan_to_num(nan=math.inf).max()) if off.numel() else 0.0


def _turns_keys(seq: Sequence) -> bool:
    compressor = seq.request.compressor
    return compressor is not None and compressor.policy.cache_relative
