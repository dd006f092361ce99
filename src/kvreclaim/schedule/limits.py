"""What a compression lets a sequence hold, known from its text alone: no policy's class, no torch.

    query_mixture                          the defaults
    triattention:budget=512,interval=128   a policy, then settings of the budget
    ada_kv(snapkv, alpha=0.1):budget=1024  policies as they are written everywhere (spec.py)

What this table says of the built-in policies is held against their classes by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvreclaim.checks import require
from kvreclaim.config import AUTO, CompressionSettings
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.arguments import WRAPPED, named_arguments, refuse_unknown, wrapped
from kvreclaim.schedule.footprint import Footprint, budget_in_blocks
from kvreclaim.schedule.spec import Spec, parse_spec
from kvreclaim.schedule.way import Way

_PLAIN = Footprint(Way.COMPACT)
_TRAITS: Mapping[str, Footprint] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "query_mixture",
                "triattention",
                "expected_attention",
                "surrogate",
                "kvzap",
                "keydiff",
                "lagkv",
                "knorm",
                "streaming_llm",
                "random",
                "oracle",
                "tova",
            ),
            _PLAIN,
        ),
        "snapkv": Footprint(Way.COMPACT, window=32),
        "r_kv": Footprint(Way.COMPACT, window=8),
        "h2o": Footprint(Way.COMPACT, window=None),
        "kvzip": Footprint(Way.COMPACT, prompt_only=True),
        "paged_eviction": Footprint(Way.BLOCKS),
        "quest": Footprint(Way.READS),
        "full": Footprint(Way.KEEP),
    }
)
_EQUAL = (Way.COMPACT,)
_WRAPPERS: Mapping[str, tuple[str, Way | None, tuple[Way, ...]]] = MappingProxyType(
    {
        "pyramidkv": ("snapkv", Way.CELLS, _EQUAL),
        "ada_kv": ("snapkv", Way.CELLS, _EQUAL),
        "shares": ("surrogate", Way.CELLS, _EQUAL),
        "evict-only": ("query_mixture", Way.MASK, _EQUAL),
        "critical": ("query_mixture", None, (*_EQUAL, Way.MASK)),
        "segments": ("query_mixture", None, (*_EQUAL, Way.MASK)),
        "protect": ("query_mixture", None, (*_EQUAL, Way.MASK, Way.BLOCKS)),
    }
)
"""The policy that each wraps where none is named, its way, if that is not the inner one's, and the ways
that it may wrap."""
_UNFIT: Mapping[Way, str] = MappingProxyType(
    {
        Way.KEEP: "keeps everything, so that there is nothing to rank",
        Way.READS: "keeps everything, so that there is nothing to rank",
        Way.MASK: "moves nothing",
        Way.BLOCKS: "evicts whole blocks, not tokens",
        Way.CELLS: "lets heads keep unequal numbers of tokens",
    }
)

OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys((*_TRAITS, *_WRAPPERS), ()),
        "query_mixture": ("offsets", "value_norm", "normalise", "form", "temperature"),
        "triattention": ("aggregate", "use_trig", "use_norm"),
        "expected_attention": ("horizon", "covariance", "value_norm", "group"),
        "snapkv": ("window", "kernel", "pooling", "when", "group"),
        "r_kv": ("weight", "window", "kernel", "threshold", "group", "similarity", "block"),
        "lagkv": ("lag", "cross"),
        "knorm": ("keep",),
        "streaming_llm": ("positions",),
        "random": ("seed",),
        "oracle": ("aggregate", "horizon"),
        "pyramidkv": (WRAPPED, "beta"),
        "ada_kv": (WRAPPED, "alpha"),
        "shares": (WRAPPED, "floor", "by"),
        "evict-only": (WRAPPED,),
        "critical": (WRAPPED, "first_stage"),
        "segments": (WRAPPED, "n", "share"),
        "protect": (WRAPPED, "first", "last", "spans"),
    }
)
"""Of every policy, in their order; what values they take only the classes know."""

SETTINGS = ("budget", "interval", "sinks", "recent")
"""Of CompressionSettings, those that a text may name."""


def traits(policy: str) -> Footprint:
    """Way, prompt_only and window of a policy as it is written, whatever the budget. Raises:
    InvalidArgumentError if it is not to be read or not built in."""
    return _traits(parse_spec(policy))


def footprint(text: str, *, block_size: int = 16, max_chunk: int = 2048) -> Footprint:
    """What `policy[:setting=value,…]` lets a sequence hold. Raises: InvalidArgumentError."""
    policy, settings = _split(text)
    lengths = {name: getattr(settings, name) for name in SETTINGS}
    found = replace(traits(policy), block_size=block_size, max_chunk=max_chunk, **lengths)
    if found.way is Way.CELLS:
        always = found.sinks + found.recent
        found = replace(found, budget=budget_in_blocks(found.budget, block_size, always))
    check_blocks(found, policy)
    return found


def check_blocks(footprint: Footprint, name: str) -> None:
    """Raise InvalidArgumentError for a way of compressing that these blocks cannot serve."""
    size, budget, interval = footprint.block_size, footprint.budget, footprint.interval
    uneven, least = footprint.way is Way.CELLS, footprint.least_budget
    problem = _recall_problem(footprint)
    if uneven and interval < size:
        problem = (
            f"interval is {interval} tokens, but under {name} heads trade whole blocks of {size}, "
            f"and would have none to trade after the first pass; raise the interval to at least {size}"
        )
    elif budget < least:
        problem = (
            f"budget is {budget} tokens, but {name} goes by whole blocks of {size}, and those of "
            f"{footprint.sinks} sinks and {footprint.recent} recent tokens may take {least}; raise the "
            f"budget to {least}, or lower recent or block_size"
        )
    if problem is not None:
        raise InvalidArgumentError(f"{problem}.", field="compression")


def _recall_problem(footprint: Footprint) -> str | None:
    """Why recalled pages do not fit among the blocks of the budget; None where they do."""
    recall, size = footprint.recall, footprint.block_size
    if recall is None:
        return None
    budget, slots = footprint.budget, recall.slots(size)
    always = footprint.sinks + footprint.recent
    if budget % size:
        return (
            f"budget is {budget} tokens, but recalled pages take its last whole blocks of {size}; make it a "
            f"multiple, such as {max(1, budget // size) * size}"
        )
    if budget - slots <= always:
        return (
            f"budget is {budget} tokens, but {recall.blocks} recalled blocks of {size} beside {always} sinks "
            f"and recent tokens leave no place; raise it above {always + slots}, or lower blocks"
        )
    least = max(slots, footprint.recent, footprint.window or 1)
    if footprint.interval < least:
        return (
            f"interval is {footprint.interval} tokens, but under recall it must cover the {slots} recalled "
            f"slots, the {footprint.recent} recent tokens and the policy's window; raise it to {least}"
        )
    return None


def _split(text: str) -> tuple[str, CompressionSettings]:
    """The policy, and the settings behind the colon that follows it."""
    policy, colon, rest = text.rpartition(":")
    if not colon or ")" in rest:
        policy, rest = text, ""
    settings: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in SETTINGS:
            raise InvalidArgumentError(
                f"{text!r} has the setting {part!r}; after the colon write {', '.join(SETTINGS)}, each with "
                "=tokens, as in 'triattention:budget=512,interval=128'."
            )
        require(value.isdecimal(), f"{text!r}: {name} is {value!r}; it must be a number of tokens.")
        settings[name] = int(value)
    return policy, CompressionSettings(**settings)


def _traits(spec: Spec) -> Footprint:
    require(
        spec.name != AUTO,
        "policy auto stands for another one, which the model's statistics name; write that one here "
        "(`kvreclaim calibrate --show FILE` says it).",
    )
    if spec.name not in OPTIONS:
        raise InvalidArgumentError(
            f"policy {spec.name!r} is not built in, and what it does to memory is not known without its "
            f"class; known are {', '.join((*_TRAITS, *_WRAPPERS))}."
        )
    names = OPTIONS[spec.name]
    given = named_arguments(spec, names)
    refuse_unknown(spec.name, names, given)
    if spec.name in _WRAPPERS:
        default, way, takes = _WRAPPERS[spec.name]
        what = wrapped(spec.name, given.get(WRAPPED, default))
        inner = _traits(what)
        require(
            inner.way in takes,
            f"{spec.name}({what.name}) is refused: {what.name} {_UNFIT.get(inner.way)}; wrap a policy that "
            f"ranks tokens, such as {spec.name}({default}).",
        )
        return inner if way is None else replace(inner, way=way)
    found = _TRAITS[spec.name]
    if spec.name in ("snapkv", "r_kv") and isinstance(window := given.get("window"), int):
        found = replace(found, window=window)
    return replace(found, prompt_only=True) if given.get("when") == "prefill" else found
