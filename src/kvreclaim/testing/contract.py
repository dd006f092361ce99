"""The contract of every policy, checked on toy layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor, PassQuestion
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policy import CompressionPolicy, CountsQuestion, LayerView, Mode, Signal
from kvreclaim.compression.registry import make_policy, object_spec, policy_spec
from kvreclaim.compression.wrapping import ranked
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.ops.rope import RopeLayout
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.testing import toys

ROPES = {"full": toys.layout(4), "interleaved": toys.layout(4, "interleaved"), "partial": toys.layout(3)}
LENGTHS = (1, 3, 9, 300)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_policy(policy: str | CompressionPolicy) -> None:
    """Run every check on a policy: a registered one as it is written ("knorm(keep=large)"), or any object.

    A handful of passes over toy layers: seconds, no model, no network.

    Raises: AssertionError naming the policy and what it breaks, InvalidArgumentError if it is not known.
    """
    for check in CHECKS:
        check(_fresh(policy))


def _fresh(policy: str | CompressionPolicy) -> CompressionPolicy:
    """The policy, made anew from its text, or from its fields where it is not registered."""
    if isinstance(policy, str):
        return make_policy(policy)
    spec, unregistered = object_spec(policy)
    if unregistered is None:
        return make_policy(spec)
    fields: Any = unregistered
    made: CompressionPolicy = dataclasses.replace(fields)
    return made


def declares_itself(policy: CompressionPolicy) -> None:
    """A frozen dataclass that compares, hashes, is written and read back, and whose traits fit together."""
    spec = policy_spec(policy)
    assert dataclasses.is_dataclass(policy), f"{spec} is no dataclass"
    assert isinstance(policy.default_mode, Mode), f"{spec}: default_mode is {policy.default_mode!r}"
    assert all(isinstance(signal, Signal) for signal in policy.needs), f"{spec}: needs {policy.needs!r}"
    assert policy == _fresh(policy), f"{spec} is not what its written form makes"
    assert hash(policy) == hash(_fresh(policy)), f"{spec} hashes by identity"
    assert type(policy).__dataclass_params__.frozen, f"{spec} can be changed"
    window = policy.query_window
    assert Signal.RECENT_QUERIES not in policy.needs or window > 0, f"{spec} needs queries in a window of 0"
    assert isinstance(policy.eviction_method, EvictionMethod), (
        f"{spec}: eviction_method is {policy.eviction_method!r}"
    )
    turned = policy.cache_relative and Signal.POSITIONS in policy.needs
    assert not turned, f"{spec} asks for positions in the text, and takes slots for positions"


def scores_are_finite(policy: CompressionPolicy) -> None:
    """[K, T] fp32 without inf or NaN, for every rotation, dtype and length, zeros and no candidates."""
    for view in _views():
        _finite_scores(policy, view)
        _finite_scores(policy, dataclasses.replace(view, candidates=slice(1, 1)))
        _finite_scores(policy, toys.with_kv(view, torch.zeros_like(view.keys), torch.zeros_like(view.values)))


def is_pure(policy: CompressionPolicy) -> None:
    """The same view gives the same scores, changes in nothing, and no global generator moves."""
    view, untouched = _view(), _view()
    before = torch.get_rng_state()
    first = _scores(policy, view)
    torch.rand(3)
    again = _scores(policy, view)
    torch.set_rng_state(before)
    _scores(policy, view)
    assert torch.equal(before, torch.get_rng_state()), f"{policy_spec(policy)} moves the global generator"
    assert torch.equal(first, again), f"{policy_spec(policy)} scores one view in two ways"
    for ours, other in zip(_tensors(view), _tensors(untouched), strict=True):
        assert torch.equal(ours, other), f"{policy_spec(policy)} changes the view"


def heads_are_apart(policy: CompressionPolicy) -> None:
    """A KV head's scores depend on that head alone, or else all heads have the same scores."""
    view = _view()
    both = _scores(policy, view)
    if torch.equal(both[0], both[1]):
        return
    for head in range(2):
        torch.testing.assert_close(
            _scores(policy, toys.kv_head_view(view, head))[0],
            both[head],
            msg=lambda text: f"{policy_spec(policy)}: a head's scores depend on other heads. {text}",
        )


def layers_may_be_stacked(policy: CompressionPolicy) -> None:
    """Layers that are scored together keep what they keep one by one (any_layers)."""
    if not policy.any_layers or _special(policy):
        return
    alone, together = (_choose(policy, budget=5, logical_len=40, stacked=each) for each in (False, True))
    assert torch.equal(alone, together), f"{policy_spec(policy)} scores stacked layers in another way"


def strides_do_not_matter(policy: CompressionPolicy) -> None:
    """Keys and values score alike however they lie in memory."""
    view = _view()
    keys, values = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in view.source.tensors())
    torch.testing.assert_close(_scores(policy, toys.with_kv(view, keys, values)), _scores(policy, view))


def a_roomy_budget_keeps_all(policy: CompressionPolicy) -> None:
    """Nothing goes where everything fits, in any mode."""
    for mode in (policy.default_mode,) if _special(policy) else Mode:
        kept = _choose(policy, budget=9, logical_len=9, mode=mode)
        assert torch.equal(kept, torch.arange(9).expand_as(kept)), f"{policy_spec(policy)} evicts too early"


def keeps_the_budget(policy: CompressionPolicy) -> None:
    """Exactly the budget stays, ascending, sinks and recent tokens in it."""
    if _special(policy) or not policy.eviction_method.evicts:
        return
    kept = _choose(policy, budget=6, logical_len=30, mode=policy.default_mode)
    assert kept.shape[-1] == 6, f"{policy_spec(policy)} keeps {kept.shape[-1]} tokens of 6"
    assert bool((kept.diff(dim=-1) > 0).all()), f"{policy_spec(policy)} keeps tokens out of order"
    for row in kept.flatten(0, 1).tolist():
        assert {0, 7, 8} <= set(row), f"{policy_spec(policy)} evicts sinks or recent tokens"


def counts_add_up(policy: CompressionPolicy) -> None:
    """Unequal counts have the budget as their mean and lie within what each head has."""
    if not policy.eviction_method.uneven:
        return
    stats = toys.query_stats(toys.model_facts())
    layers = tuple(stats.layer(n) for n in range(3))
    for lengths in ([20, 20, 20], [30, 12, 6], [9, 9, 9]):
        scores = [[toys.noise(10 * n + h, length) for h in range(2)] for n, length in enumerate(lengths)]
        counts = policy.counts(CountsQuestion(scores, 3, 10, 45, layers))
        limit = torch.tensor(lengths, dtype=torch.float64)[:, None].expand(3, 2)
        assert counts.shape == (3, 2), f"{policy_spec(policy)} counts {list(counts.shape)}, not [L, K]"
        assert counts.is_floating_point(), f"{policy_spec(policy)} counts in {counts.dtype}"
        mean = float(counts.double().mean())
        assert abs(mean - 10) < 1e-6, f"{policy_spec(policy)} counts {mean} on average, not 10"
        inside = (counts >= 3) & (counts <= 3 + limit)
        assert bool(inside.all()), f"{policy_spec(policy)} counts outside [protected, protected + T]"


def block_scores_fit(policy: CompressionPolicy) -> None:
    """One finite fp32 score per KV head and block, for one query or many."""
    if not policy.eviction_method.sparse_reads:
        return
    keys = toys.noise(3, 5, 2, 4, 8)
    low, high = keys, keys + toys.noise(4, 5, 2, 4, 8).abs()
    queries = toys.noise(5, 5, 4, 8)
    scores = policy.block_scores(queries, low, high)
    assert scores.shape == (5, 2, 4), f"{policy_spec(policy)} scores blocks as {list(scores.shape)}"
    assert scores.dtype == torch.float32, f"{policy_spec(policy)} scores blocks in {scores.dtype}"
    assert bool(scores.isfinite().all()), f"{policy_spec(policy)}: a block's score is not finite"
    torch.testing.assert_close(policy.block_scores(queries[2], low[2], high[2]), scores[2])


CHECKS: tuple[Callable[[CompressionPolicy], None], ...] = (
    declares_itself,
    scores_are_finite,
    is_pure,
    heads_are_apart,
    layers_may_be_stacked,
    strides_do_not_matter,
    a_roomy_budget_keeps_all,
    keeps_the_budget,
    counts_add_up,
    block_scores_fit,
)


def _special(policy: CompressionPolicy) -> bool:
    """Whether the engine chooses otherwise than by equal counts of tokens."""
    return policy.eviction_method.fixes_mode


def _view(rope: RopeLayout | None = None, num_tokens: int = 9) -> LayerView:
    facts = toys.model_facts(rope=rope)
    logical_len = num_tokens + 31
    stats = toys.query_stats(facts).layer(0)
    return toys.layer_view(facts.layers[0], stats, num_tokens=num_tokens, logical_len=logical_len)


def _views() -> Iterator[LayerView]:
    for rope in ROPES.values():
        for dtype in DTYPES:
            view = _view(rope)
            yield toys.with_kv(view, view.keys.to(dtype), view.values.to(dtype))
    for num_tokens in LENGTHS:
        view = _view(num_tokens=num_tokens)
        yield view
        yield dataclasses.replace(view, logical_len=num_tokens, first=True)


def _scores(policy: CompressionPolicy, view: LayerView) -> Tensor:
    """The scores that tokens are selected by within a head."""
    return ranked(policy, view, policy.score(view))


def _finite_scores(policy: CompressionPolicy, view: LayerView) -> None:
    scores = _scores(policy, view)
    expected = (view.source.shape, torch.float32)
    got = (tuple(scores.shape), scores.dtype)
    assert got == expected, f"{policy_spec(policy)} gives scores {got}, not {expected}"
    assert bool(scores.isfinite().all()), (
        f"{policy_spec(policy)}: of {view.source.shape} a score is not finite"
    )


def _tensors(view: LayerView) -> list[Tensor]:
    assert view.stats is not None
    parts = [getattr(part, f.name) for part in (view.stats, view.signals) for f in dataclasses.fields(part)]
    return [*view.source.tensors(), *(part for part in parts if isinstance(part, Tensor))]


def _choose(
    policy: CompressionPolicy,
    *,
    budget: int,
    logical_len: int,
    mode: Mode | None = None,
    stacked: bool = False,
) -> Tensor:
    """Tokens that a compression of nine keeps: [L | 1, K | 1, kept]. stacked: layers are scored together"""
    facts: ModelFacts = toys.model_facts()
    config = CompressionConfig(policy, budget=budget, sinks=1, recent=2, mode=mode)
    compressor = Compressor(config, facts, toys.query_stats(facts))

    def source(*layers: int) -> DenseSource:
        keys, values = (torch.cat([toys.noise(n + seed, 2, 9, 8) for n in layers]) for seed in (0, 9))
        return DenseSource(keys, values)

    question = PassQuestion(
        source,
        9,
        4,
        logical_len,
        signals=lambda layer: toys.layer_signals(facts.layers[layer], 9, logical_len, seed=10 * layer),
        first=logical_len == 9,
        stack=(lambda layers: source(*layers)) if stacked else None,
    )
    return compressor.choose_all([question])[0]
