"""A policy bound to a model: which slots of a sequence stay, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.layer_stacks import Layers, LayerStacks, StackSource, joined_signals
from kvreclaim.compression.policy import (
    NO_SIGNALS,
    CompressionPolicy,
    LayerSignals,
    LayerView,
    Mode,
    Signal,
    score_all,
)
from kvreclaim.compression.refusals import (
    STATISTICS,
    check_policy,
    layer_stats,
)
from kvreclaim.compression.select import (
    ALWAYS,
    FREE,
    PROMPT,
    NanCheck,
    lowest_blocks,
    refuse_nan,
    select_each,
)
from kvreclaim.compression.stats import LayerStats, QueryStats, stats_digest
from kvreclaim.compression.wrapping import ranked
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import reference
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.facts import LayerFacts, ModelFacts
from kvreclaim.ops.key_source import KeySource
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.protection import Rules, candidates

LayerSource = Callable[[int], KeySource]
SignalSource = Callable[[int], LayerSignals]


@dataclass(frozen=True, slots=True, eq=False)
class PassQuestion:
    """Input of a compression pass over one sequence.

    source:           layer -> its keys and values in token order; called once per voting layer
    num_tokens:       T, the live tokens
    num_prompt_slots: leading slots that hold prompt tokens
    logical_len:      position of the next query; >= T
    positions:        [L, K, T] logical positions of the slots (or broadcastable), for models with sliding
                      layers; without it a slot counts as out of a window only if it must be
    signals:          layer -> the policy's signals, except statistics
    first:            True if nothing has been evicted yet
    stack:            layers -> their keys and values as one layer's, where that saves launches
    keep:             tokens kept, at least the budget; None: the budget
    """

    source: LayerSource
    num_tokens: int
    num_prompt_slots: int
    logical_len: int
    positions: Tensor | None = None
    signals: SignalSource = lambda _: NO_SIGNALS
    first: bool = True
    stack: StackSource | None = None
    keep: int | None = None


class Compressor:
    """Selects the tokens that a compression keeps. Holds the statistics on the model's device and is
    otherwise stateless: every method is a function of its arguments.

    Args:
        config: a checked config
        facts:  the model
        stats:  statistics of the model's queries; None takes config.stats (read here if it is a path). A
                tuple holds one entry per layer, on the model's device and checked against the model
        backend: selects the highest scores (Backend.select_top, select_runs)

    eviction_method: COMPACT uses choose, BLOCKS choose_blocks, CELLS choose_uneven and READS
                     block_scores
    needs:           signals of the policy; empty if it never evicts

    Raises:
        InvalidArgumentError: the policy needs statistics, centres or a rotation that are missing
        StatsMismatchError:   the statistics are malformed or of another model
    """

    def __init__(
        self,
        config: CompressionConfig,
        facts: ModelFacts,
        stats: QueryStats | tuple[LayerStats, ...] | None = None,
        backend: Backend = reference,
    ) -> None:
        self.config = config
        self.facts = facts
        self.backend = backend
        self.policy: CompressionPolicy = config.make_policy()
        self.eviction_method: EvictionMethod = self.policy.eviction_method
        self.needs: frozenset[Signal] = self.policy.needs if self.eviction_method.evicts else frozenset()
        self.mode = self.policy.default_mode if config.mode is None else Mode(config.mode)
        check_policy(self.policy, facts)
        self.rules = Rules(sinks=config.sinks, recent=config.recent, protect_prompt=config.protect_prompt)
        self.stats: tuple[LayerStats, ...] | None = None
        if self.policy.needs & STATISTICS:
            self.stats = layer_stats(self.policy, config.stats if stats is None else stats, facts)
        windows = [layer.softmax.window for layer in facts.layers]
        full = [n for n, window in enumerate(windows) if window is None]
        alone = self.mode is Mode.PER_LAYER_HEAD and not self.eviction_method.whole_blocks
        self._voters = tuple(full if full and not alone else range(facts.num_layers))
        widest = None if full else max(window for window in windows if window is not None)
        self.stacks = LayerStacks(facts, self.stats, self._voters)
        self._heads: dict[tuple[int, int], tuple[LayerFacts, LayerStats | None]] = {}
        self._windows = tuple(windows if alone else [widest] * facts.num_layers)
        self._siblings: dict[int, Compressor] = {}

    @property
    def budget(self) -> int:
        """Tokens kept per layer and KV head."""
        return self.config.budget

    def with_budget(self, budget: int, block_size: int) -> Compressor:
        """Return a cached compressor with another budget, rounded to blocks of this size."""
        if budget not in self._siblings:
            config = replace(self.config, budget=budget).in_blocks(block_size)
            self._siblings[budget] = Compressor(config, self.facts, self.stats, self.backend)
        return self._siblings[budget]

    def tiers(self, num_tokens: int, num_prompt_slots: int) -> np.ndarray:
        """Return the protection of each slot, [T] int64: 2 sinks and recent tokens, 1 prompt, 0 free.

        num_prompt_slots: leading slots that hold prompt tokens; read only with protect_prompt
        """
        tiers = np.full(num_tokens, FREE)
        if self.config.protect_prompt:
            tiers[:num_prompt_slots] = PROMPT
        tiers[: self.config.sinks] = ALWAYS
        tiers[max(0, num_tokens - self.config.recent) :] = ALWAYS
        return tiers

    def choose(
        self,
        layer_source: LayerSource,
        num_tokens: int,
        num_prompt_slots: int,
        logical_len: int,
        *,
        positions: Tensor | None = None,
        signals: SignalSource = lambda _: NO_SIGNALS,
        first: bool | None = None,
        keep: int | None = None,
        check: NanCheck = refuse_nan,
    ) -> Tensor:
        """Run choose_all on one sequence. first: None stands for logical_len == num_tokens."""
        first = logical_len == num_tokens if first is None else first
        question = PassQuestion(
            layer_source, num_tokens, num_prompt_slots, logical_len, positions, signals, first, keep=keep
        )
        return self.choose_all([question], check=check)[0]

    @torch.no_grad()
    def choose_all(self, questions: Sequence[PassQuestion], *, check: NanCheck = refuse_nan) -> list[Tensor]:
        """Return the slots that each of several sequences keeps, independently of the other sequences.

        check: handles NaN scores, as in select, with a bool of each sequence

        Returns: [L | 1, K | 1, min(keep, T)] int64 ascending each, by mode. Sliding layers do not vote in
            union and per_head mode unless all layers slide.
        Raises: InvalidArgumentError if the policy gives scores of a wrong shape or NaN.
        """
        over = [
            i for i, q in enumerate(questions) if q.num_tokens > self._keep(q) and self.eviction_method.evicts
        ]
        votes = dict(zip(over, self._votes([questions[i] for i in over]), strict=True))
        if over:
            none = torch.zeros((), dtype=torch.bool, device=votes[over[0]].device)
            check(
                torch.stack([votes[i].isnan().any() if i in votes else none for i in range(len(questions))])
            )
        groups: dict[tuple[int, int, int], list[int]] = {}
        for i in over:
            prompt = questions[i].num_prompt_slots if self.config.protect_prompt else 0
            groups.setdefault((questions[i].num_tokens, prompt, self._keep(questions[i])), []).append(i)
        found: dict[int, Tensor] = {}
        for (num_tokens, prompt, keep), places in groups.items():
            tiers, scores = self.tiers(num_tokens, prompt), [votes.pop(i) for i in places]
            kept = select_each(scores, keep, tiers, self.mode, self.backend.select_top)
            found.update(zip(places, kept, strict=True))
        return [found[i] if i in found else self._everything(q.num_tokens) for i, q in enumerate(questions)]

    def _keep(self, question: PassQuestion) -> int:
        keep = self.budget if question.keep is None else question.keep
        assert keep >= self.budget, f"{keep} tokens to keep, below the budget of {self.budget}"
        return keep

    @torch.no_grad()
    def choose_blocks(self, questions: Sequence[PassQuestion], block_size: int) -> list[list[int]]:
        """Return the full blocks that each of several sequences frees under a policy of whole blocks.

        Returns: ceil((T - budget) / block_size) ascending indices. Blocks with a protected prompt token are
            freed after all others, blocks with a sink or a recent token never.
        Raises: as choose_all.
        """
        over = [q for q in questions if q.num_tokens > self.budget]
        votes = iter(self._votes(over))
        found = []
        for q in questions:
            tiers = self.tiers(q.num_tokens, q.num_prompt_slots)
            known = q.num_tokens > self.budget
            found.append(lowest_blocks(next(votes), self.budget, tiers, block_size) if known else [])
        return found

    @cached_property
    def weights_digest(self) -> str:
        """sha256 of the weights that score tokens during the forward pass, if the policy needs them."""
        digest = sha256()
        for layer in self.stats or ():
            for weights in (layer.kvzap_in, layer.kvzap_out):
                if weights is not None:
                    digest.update(weights.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def stats_digest(self) -> str | None:
        """sha256 of all statistics that the policy may read; None if it needs none."""
        return None if self.stats is None else stats_digest(self.stats)

    def stats_of(self, layer: int) -> LayerStats | None:
        """Return the statistics of one layer, if the policy needs any."""
        return None if self.stats is None else self.stats[layer]

    def of_head(self, layer: int, head: int) -> tuple[LayerFacts, LayerStats | None]:
        """Return cached facts and statistics of one KV head and its query heads."""
        if (layer, head) not in self._heads:
            facts, stats = self.facts.layers[layer], self.stats_of(layer)
            own = None if stats is None else stats.kv_head(head, facts.num_kv_heads)
            self._heads[layer, head] = facts.kv_head(head), own
        return self._heads[layer, head]

    def split(self, num_tokens: int, stacks: bool) -> Iterator[Layers]:
        """Yield the layers that are scored; in stacks, if the policy takes them too."""
        return self.stacks.split(num_tokens, stacks and self.policy.any_layers)

    def score(self, views: Sequence[LayerView]) -> list[Tensor]:
        """Return the policy's scores [K, T] of one layer, or of a stack, of each sequence.

        Raises: InvalidArgumentError if they are of a wrong shape or dtype.
        """
        found = score_all(self.policy, views)
        for view, scores in zip(views, found, strict=True):
            if scores.shape != view.source.shape or scores.dtype != torch.float32:
                raise InvalidArgumentError(
                    f"policy {self.policy.name} scored layer {view.layer} with {scores.dtype} "
                    f"{list(scores.shape)}; it must be float32 {list(view.source.shape)}."
                )
        return found

    @torch.no_grad()
    def block_scores(self, queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Return the policy's block scores. Raises: InvalidArgumentError for a wrong shape or dtype."""
        scores = self.policy.block_scores(queries, low, high)
        if scores.shape != low.shape[:-1] or scores.dtype != torch.float32:
            raise InvalidArgumentError(
                f"policy {self.policy.name} scored blocks with {scores.dtype} {list(scores.shape)}; "
                f"it must be float32 {list(low.shape[:-1])}."
            )
        return scores

    def _votes(self, questions: Sequence[PassQuestion]) -> list[Tensor]:
        """Return scores [voters, K, T] fp32 of each sequence; a stack of layers is scored for all sequences
        at once."""
        if not questions:
            return []
        found: list[dict[int, Tensor]] = [{} for _ in questions]
        longest = max(question.num_tokens for question in questions)
        for layers in self.split(longest, all(question.stack is not None for question in questions)):
            for own, scores in zip(found, self._scores(layers, questions), strict=True):
                own.update(zip(layers, scores.unflatten(0, (len(layers), -1)), strict=True))
        return [torch.stack([own[layer] for layer in self._voters]) for own in found]

    def _everything(self, num_tokens: int) -> Tensor:
        layers = self.facts.num_layers if self.mode is Mode.PER_LAYER_HEAD else 1
        heads = 1 if self.mode is Mode.UNION else self.facts.layers[0].num_kv_heads
        return torch.arange(num_tokens, device=self.facts.device).repeat(layers, heads, 1)

    def _scores(self, layers: Layers, questions: Sequence[PassQuestion]) -> list[Tensor]:
        """Return scores [n * K, T] fp32 of a stack; -inf for tokens that no future query of a layer sees."""
        views = [self._view(layers, question) for question in questions]
        found = self.score(views)
        if self.policy.reranks:
            found = [ranked(self.policy, *pair) for pair in zip(views, found, strict=True)]
        window = self._windows[layers[0]]
        if window is None:
            return found
        return [
            scores.masked_fill(self._unseen(layers, window, question), -torch.inf)
            for question, scores in zip(questions, found, strict=True)
        ]

    def _view(self, layers: Layers, question: PassQuestion) -> LayerView:
        num_tokens, prompt = question.num_tokens, question.num_prompt_slots
        keep = self._keep(question)
        return LayerView(
            layers[0],
            question.source(layers[0]) if question.stack is None else question.stack(layers),
            question.logical_len,
            *self.stacks.of(layers),
            candidates(num_tokens=num_tokens, prompt_slots=prompt, keep=keep, **self.rules),
            signals=self._signals(layers, question),
            first=question.first,
            budget=keep,
            num_layers=len(layers),
        )

    def _signals(self, layers: Layers, question: PassQuestion) -> LayerSignals:
        """Return the engine's signals, with positions where they are known."""
        heads = self.facts.layers[0].num_kv_heads
        signals = joined_signals([question.signals(layer) for layer in layers], heads)
        positions = self._positions(layers, question)
        if signals.positions is not None or positions is None:
            return signals
        return replace(signals, positions=positions)

    def _positions(self, layers: Layers, question: PassQuestion) -> Tensor | None:
        """Return positions [n * K, T] of a stack; None if unknown."""
        if question.positions is None:
            return None
        heads = self.facts.layers[0].num_kv_heads
        table = question.positions.expand(self.facts.num_layers, heads, question.num_tokens)
        return torch.cat([table[layer] for layer in layers]).to(self.facts.device)

    def _unseen(self, layers: Layers, window: int, question: PassQuestion) -> Tensor:
        """Return a mask [n * K, T] or [T] of slots with a position of at most L - window. Unknown positions
        are at most L - T + slot, since they ascend up to L - 1; exact while nothing has been evicted."""
        oldest = question.logical_len - window
        positions = self._positions(layers, question)
        if positions is not None:
            return positions <= oldest
        slots = torch.arange(question.num_tokens, device=self.facts.device)
        return slots + (question.logical_len - question.num_tokens) <= oldest


def needs_of(compressor: Compressor | None) -> frozenset[Signal]:
    """Return the signals that the compressor needs, if it ever evicts."""
    return frozenset() if compressor is None else compressor.needs


def choose_together(
    compressors: Sequence[Compressor], choose: Callable[[Compressor, list[int]], list[Any]]
) -> list[Any]:
    """Choose the kept slots of several passes, those with the same compressor together. If they fail
    together, each chooses alone.

    compressors: of each pass; choose: (compressor, places of the passes) -> the choice of each

    Returns: the choice of each, or its error.
    """
    members: dict[Compressor, list[int]] = {}
    for i, compressor in enumerate(compressors):
        members.setdefault(compressor, []).append(i)
    found: dict[int, Any] = {}
    for compressor, places in members.items():
        together = tried(choose, compressor, places)
        if isinstance(together, Exception):
            alone = [tried(choose, compressor, [i]) for i in places]
            together = [one if isinstance(one, Exception) else one[0] for one in alone]
        found.update(zip(places, together, strict=True))
    return [found[i] for i in range(len(compressors))]


def tried(work: Any, *args: Any) -> Any:
    """Call `work`. Returns: its result, or the error."""
    try:
        return work(*args)
    except Exception as error:
        return error
