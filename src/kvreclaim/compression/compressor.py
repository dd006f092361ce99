"""A policy bound to a model: which slots of a sequence stay, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.config import CompressionConfig, StatsSource
from kvreclaim.compression.policy import (
    NO_SIGNALS,
    CompressionPolicy,
    LayerSignals,
    LayerView,
    Mode,
    Signal,
)
from kvreclaim.compression.select import select
from kvreclaim.compression.stats import RECALIBRATE, LayerStats, QueryStats
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import reference
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.key_source import KeySource

LayerSource = Callable[[int], KeySource]
SignalSource = Callable[[int], LayerSignals]
STATISTICS = frozenset({Signal.QUERY_STATS, Signal.QUERY_CENTERS, Signal.QUERY_COVARIANCE})
FREE, PROMPT, ALWAYS = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """What one compression knows: lengths in tokens; positions [L, K, T] where the engine has them."""

    num_tokens: int
    logical_len: int
    candidates: slice
    positions: Tensor | None
    signals: SignalSource


class Compressor:
    """Chooses what a compression keeps. Holds the statistics on the model's device; otherwise
    stateless: every method is a function of its arguments.

    Args:
        config: checked already
        facts:  the model
        stats:  of the model's queries; None takes config.stats (read here if it is a path)
        select_top: the op that finds the best of each row (Backend.select_top)

    Raises:
        InvalidArgumentError: the policy needs statistics, centres or a rotation that are not there
        StatsMismatchError:   the statistics are malformed or of another model
    """

    def __init__(
        self,
        config: CompressionConfig,
        facts: ModelFacts,
        stats: QueryStats | None = None,
        select_top: Callable[[Tensor, int], Tensor] = reference.select_top,
    ) -> None:
        self.config = config
        self.facts = facts
        self._select_top = select_top
        self.policy: CompressionPolicy = config.make_policy()
        self.mode = self.policy.default_mode if config.mode is None else Mode(config.mode)
        self._stats: tuple[LayerStats, ...] | None = None
        if self.policy.needs & STATISTICS:
            _check_rotation(self.policy, facts)
            found = _required_stats(self.policy, stats if stats is not None else config.stats)
            found.check_model(facts)
            self._stats = tuple(found.layer(n).to(facts.device) for n in range(facts.num_layers))
        windows = [layer.sliding_window for layer in facts.layers]
        full = [n for n, window in enumerate(windows) if window is None]
        alone = self.mode is Mode.PER_LAYER_HEAD
        self._voters = tuple(full if full and not alone else range(facts.num_layers))
        widest = None if full else max(window for window in windows if window is not None)
        self._windows = tuple(windows if alone else [widest] * facts.num_layers)

    @property
    def evicts(self) -> bool:
        """Whether choose is ever worth asking."""
        return self.policy.evicts

    @property
    def compacts(self) -> bool:
        """Whether survivors are to be moved together; without it, no block empties but by chance."""
        return self.policy.compacts

    @property
    def budget(self) -> int:
        """Tokens kept per layer and KV head."""
        return self.config.budget

    @property
    def interval(self) -> int:
        """Tokens over the budget at which a sequence is compressed."""
        return self.config.interval

    def tiers(self, num_tokens: int, num_prompt_slots: int) -> Tensor:
        """Protection of each slot, [T] int64 on the CPU: 2 sinks and recent tokens, 1 prompt, 0 free.

        num_prompt_slots: leading slots that hold prompt tokens; read only with protect_prompt
        """
        tiers = torch.full((num_tokens,), FREE)
        if self.config.protect_prompt:
            tiers[:num_prompt_slots] = PROMPT
        tiers[: self.config.sinks] = ALWAYS
        tiers[max(0, num_tokens - self.config.recent) :] = ALWAYS
        return tiers

    def kept_prompt_slots(self, num_tokens: int, num_prompt_slots: int) -> int:
        """Prompt slots left after a compression of num_tokens slots: with protect_prompt the same in
        every head. Without it heads differ, nothing reads the count, and it is 0 once anything goes."""
        if num_tokens <= self.budget or not self.evicts:
            return num_prompt_slots
        if not self.config.protect_prompt:
            return 0
        sinks, recent_start = self.config.sinks, num_tokens - self.config.recent
        always = min(sinks, num_prompt_slots) + max(0, num_prompt_slots - recent_start)
        places = self.budget - sinks - self.config.recent
        return always + min(num_prompt_slots - always, places)

    @torch.no_grad()
    def choose(
        self,
        layer_source: LayerSource,
        num_tokens: int,
        num_prompt_slots: int,
        logical_len: int,
        *,
        positions: Tensor | None = None,
        signals: SignalSource = lambda _: NO_SIGNALS,
    ) -> Tensor:
        """The slots that stay.

        Args:
            layer_source:     layer -> its keys and values in token order; asked once per layer that votes
            num_tokens:       T, the physical length
            num_prompt_slots: leading slots that hold prompt tokens
            logical_len:      position of the next query; >= T
            positions:        [L, K, T] logical positions of the slots (or broadcastable), for models with
                              sliding layers; without it a slot counts as out of a window only if it must be
            signals:          layer -> what the policy's needs name besides statistics

        Returns: [L | 1, K | 1, min(budget, T)] int64 ascending, by mode. Sliding layers do not vote in
            union and per_head mode unless all layers slide.
        Raises: InvalidArgumentError if the policy gives scores of a wrong shape or NaN.
        """
        tiers = self.tiers(num_tokens, num_prompt_slots)
        if num_tokens <= self.budget or not self.evicts:
            return self._everything(num_tokens)
        free = self._candidates(num_tokens, num_prompt_slots)
        job = _Pass(num_tokens, logical_len, free, positions, signals)
        scores = torch.stack([self._scores(layer, layer_source, job) for layer in self._voters])
        return select(scores, self.budget, tiers, self.mode, self._select_top)

    def _everything(self, num_tokens: int) -> Tensor:
        layers = self.facts.num_layers if self.mode is Mode.PER_LAYER_HEAD else 1
        heads = 1 if self.mode is Mode.UNION else self.facts.layers[0].num_kv_heads
        return torch.arange(num_tokens, device=self.facts.device).repeat(layers, heads, 1)

    def _candidates(self, num_tokens: int, num_prompt_slots: int) -> slice:
        """Slots that may go: all between sinks and recent tokens, less a prompt that stays whole."""
        first, end = self.config.sinks, num_tokens - self.config.recent
        whole = self.kept_prompt_slots(num_tokens, num_prompt_slots) == num_prompt_slots
        if self.config.protect_prompt and whole:
            first = max(first, num_prompt_slots)
        return slice(first, max(first, end))

    def _scores(self, layer: int, layer_source: LayerSource, job: _Pass) -> Tensor:
        """[K, T] fp32 of one layer; -inf for tokens that none of its future queries can see."""
        source = layer_source(layer)
        facts = self.facts.layers[layer]
        stats = None if self._stats is None else self._stats[layer]
        view = LayerView(
            layer,
            source,
            job.logical_len,
            facts,
            stats,
            job.candidates,
            signals=job.signals(layer),
            first=job.logical_len == job.num_tokens,
        )
        scores = self.policy.score(view)
        if scores.shape != source.shape or scores.dtype != torch.float32:
            raise InvalidArgumentError(
                f"policy {self.policy.name} scored layer {layer} with {scores.dtype} {list(scores.shape)}; "
                f"it must be float32 {list(source.shape)}."
            )
        window = self._windows[layer]
        return scores if window is None else scores.masked_fill(self._unseen(layer, window, job), -torch.inf)

    def _unseen(self, layer: int, window: int, job: _Pass) -> Tensor:
        """Slots whose position is at most L - window: [K, T] or [T] bool. Unknown positions are at most
        L - T + slot, since they ascend up to L - 1; exact as long as nothing has been evicted."""
        oldest = job.logical_len - window
        if job.positions is not None:
            heads = self.facts.layers[layer].num_kv_heads
            table = job.positions.expand(self.facts.num_layers, heads, job.num_tokens)
            return (table[layer] <= oldest).to(self.facts.device)
        slots = torch.arange(job.num_tokens, device=self.facts.device)
        return slots + (job.logical_len - job.num_tokens) <= oldest


def _check_rotation(policy: CompressionPolicy, facts: ModelFacts) -> None:
    unknown = [n for n, layer in enumerate(facts.layers) if layer.rope is None]
    if facts.rope_problem is None and not unknown:
        return
    reason = facts.rope_problem or f"no rotation is known for layer {unknown[0]}"
    raise InvalidArgumentError(
        f"policy {policy.name} needs the rotation of {facts.name!r}, which is not known ({reason}); "
        "use a policy that needs none, such as knorm or streaming_llm."
    )


def _required_stats(policy: CompressionPolicy, given: StatsSource | None) -> QueryStats:
    if given is None:
        raise InvalidArgumentError(
            f"policy {policy.name} needs query statistics and none were given; {RECALIBRATE} "
            "and pass the file as stats."
        )
    stats = given if isinstance(given, QueryStats) else QueryStats.load(given)
    if Signal.QUERY_CENTERS in policy.needs and stats.num_centers == 0:
        raise InvalidArgumentError(
            f"policy {policy.name} needs statistics with centres, and those of {stats.metadata.model_name!r} "
            f"({stats.metadata.source}) hold none; {RECALIBRATE} with centres."
        )
    return stats
