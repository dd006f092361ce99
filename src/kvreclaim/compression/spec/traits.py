"""Slots that a compression lets a sequence hold, from its text alone, without policy classes and torch.

    query_mixture                          the defaults
    triattention:budget=512,interval=128   a policy, then settings of the budget
    snapkv:budget=20%                      a share of the prompt's bytes
    ada_kv(snapkv, alpha=0.1):budget=1024  policy specs (grammar.py)

policies.json holds the built-in policies' effects on memory, generated from their classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvreclaim.checks import require
from kvreclaim.compression.spec.arguments import WRAPPED, named_arguments, refuse_unknown, wrapped
from kvreclaim.compression.spec.grammar import Spec, Value, parse_spec
from kvreclaim.compression_settings import AUTO, CompressionSettings, parse_budget
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.options import settings_of
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.footprint import (
    Footprint,
    budget_in_blocks,
    check_blocks,
    share_in_blocks,
    sinks_in_blocks,
)


class Trait(StrEnum):
    """A reason, as it ends a sentence."""

    KEEPS_ALL = "keeps everything, so that there is nothing to rank"
    WHOLE_BLOCKS = "evicts whole blocks, not tokens"
    UNEVEN = "lets heads keep unequal numbers of tokens"
    CACHE_RELATIVE = "takes a token's slot for its position"


def unfit_to_wrap(method: EvictionMethod) -> Trait | None:
    """Return why wrappers may refuse a policy of this method; None if it ranks tokens with equal counts."""
    if not method.evicts:
        return Trait.KEEPS_ALL
    if method.whole_blocks:
        return Trait.WHOLE_BLOCKS
    return Trait.UNEVEN if method.uneven else None


_ROWS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    json.loads((Path(__file__).parent / "policies.json").read_text())
)
"""By name, what compression/spec_table.py has written from the classes."""

SETTINGS = ("budget", "interval", "sinks", "recent")
"""Fields of CompressionSettings that a text may name."""


def traits(policy: str) -> Footprint:
    """Return eviction method, prompt_only and window of a policy spec, for any budget. Raises:
    InvalidArgumentError if it does not parse or is not built in."""
    return _traits(parse_spec(policy))


def is_share(text: str) -> bool:
    """Return whether the budget is a share of the prompt's bytes. Raises: InvalidArgumentError."""
    return _split(text)[1].budget_share is not None


def for_prompt(text: str, num_prompt: int, block_size: int, density: Fraction) -> str:
    """Convert a budget given as a share of the prompt's bytes into tokens, like CompressionConfig.for_prompt.
    Other texts do not change. Raises: InvalidArgumentError."""
    policy, settings = _split(text)
    if settings.budget_share is None:
        return text
    defaults = {name: settings_of(CompressionSettings)[name].default for name in SETTINGS}
    sinks, recent = min(settings.sinks, defaults["sinks"]), settings.recent
    budget = share_in_blocks(settings.budget_share, num_prompt, block_size, sinks + recent, density)
    if sinks < settings.sinks:
        sinks = max(sinks, sinks_in_blocks(settings.sinks, budget - recent, block_size))
    found = {"budget": budget, "interval": settings.interval, "sinks": sinks, "recent": recent}
    named = [f"{name}={n}" for name, n in found.items() if name == "budget" or n != defaults[name]]
    return f"{policy}:{','.join(named)}"


def footprint(text: str, *, block_size: int = 16, max_chunk: int = 2048) -> Footprint:
    """Return the footprint of `policy[:setting=value,…]`; for a budget given as a share, that of an unknown
    prompt. Raises: InvalidArgumentError."""
    policy, settings = _split(text)
    lengths = {name: getattr(settings, name) for name in SETTINGS}
    found = replace(traits(policy), block_size=block_size, max_chunk=max_chunk, **lengths)
    if found.eviction_method.uneven:
        always = found.sinks + found.recent
        found = replace(found, budget=budget_in_blocks(found.budget, block_size, always))
    check_blocks(found, policy)
    return found


def _split(text: str) -> tuple[str, CompressionSettings]:
    """Split a text into the policy and the settings after its colon."""
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
        if name == "budget":
            settings[name] = parse_budget(value)
            continue
        require(value.isdecimal(), f"{text!r}: {name} is {value!r}; it must be a number of tokens.")
        settings[name] = int(value)
    return policy, CompressionSettings(policy, **settings)


def _traits(spec: Spec) -> Footprint:
    require(
        spec.name != AUTO,
        "policy auto stands for a policy that a model's statistics name, and cannot be used here; name that "
        "policy (`kvreclaim calibrate --show FILE` prints it).",
    )
    if spec.name not in _ROWS:
        raise InvalidArgumentError(
            f"policy {spec.name!r} is not built in, and what it does to memory is not known without its "
            f"class; known are {', '.join(_ROWS)}."
        )
    row = _ROWS[spec.name]
    given = named_arguments(spec, row["options"])
    refuse_unknown(spec.name, row["options"], given)
    if "wraps" in row:
        return _wrapper_traits(spec.name, row, given)
    found = Footprint(
        EvictionMethod[row["eviction_method"]], window=row["window"], prompt_only=row["prompt_only"]
    )
    if isinstance(window := given.get(row.get("window_option", "")), int):
        found = replace(found, window=window)
    option, value = row.get("prompt_only_if", ("", None))
    return replace(found, prompt_only=True) if option in given and given[option] == value else found


def _wrapper_traits(name: str, row: Mapping[str, Any], given: Mapping[str, Value]) -> Footprint:
    """Return the wrapped policy's traits, with the wrapper's own eviction method if it has one."""
    what = wrapped(name, given.get(WRAPPED, row["wraps"]))
    inner = _traits(what)
    unfit = unfit_to_wrap(inner.eviction_method)
    require(
        unfit is None or unfit.name not in row["refuses"],
        f"{name}({what.name}) is refused: {what.name} {unfit}; wrap a policy that ranks tokens, such as "
        f"{name}({row['wraps']}).",
    )
    own = row.get("eviction_method")
    return inner if own is None else replace(inner, eviction_method=EvictionMethod[own])
