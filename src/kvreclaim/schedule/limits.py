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
from kvreclaim.schedule.footprint import Footprint, budget_in_blocks
from kvreclaim.schedule.spec import Spec, Value, parse_spec
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
_WRAPPERS: Mapping[str, tuple[str, Way | None]] = MappingProxyType(
    {
        "pyramidkv": ("snapkv", Way.CELLS),
        "ada_kv": ("snapkv", Way.CELLS),
        "shares": ("surrogate", Way.CELLS),
        "evict-only": ("query_mixture", Way.MASK),
        "critical": ("query_mixture", None),
        "segments": ("query_mixture", None),
        "protect": ("query_mixture", None),
    }
)
"""The policy that each wraps where none is named, and its way, if that is not the inner one's."""

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
    problem = None
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
    if spec.name in _WRAPPERS:
        default, way = _WRAPPERS[spec.name]
        inner = _inner(spec, default)
        return inner if way is None else replace(inner, way=way)
    require(
        spec.name != AUTO,
        "policy auto stands for another one, which the model's statistics name; write that one here "
        "(`kvreclaim calibrate --show FILE` says it).",
    )
    if spec.name not in _TRAITS:
        raise InvalidArgumentError(
            f"policy {spec.name!r} is not built in, and what it does to memory is not known without its "
            f"class; known are {', '.join((*_TRAITS, *_WRAPPERS))}."
        )
    found, options = _TRAITS[spec.name], dict(spec.args)
    if spec.name in ("snapkv", "r_kv") and isinstance(window := options.get("window"), int):
        found = replace(found, window=window)
    return replace(found, prompt_only=True) if options.get("when") == "prefill" else found


def _inner(spec: Spec, default: str) -> Footprint:
    """Of the policy that a wrapper wraps: its first argument, or the one named inner."""
    given: list[Value] = [value for name, value in spec.args if name == "inner"]
    if not given and spec.args and spec.args[0][0] is None:
        given = [spec.args[0][1]]
    inner = given[0] if given else default
    if isinstance(inner, str):
        inner = Spec(inner)
    require(isinstance(inner, Spec), f"policy {spec.name} is given {inner!r} to wrap; write a policy first.")
    assert isinstance(inner, Spec)
    return _traits(inner)
