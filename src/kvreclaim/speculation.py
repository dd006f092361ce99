"""Configuration of speculative decoding, with vLLM's names where it has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvreclaim.checks import check_choice, parse_json, require
from kvreclaim.options import check_options, option

METHODS = ("ngram", "draft_model")
MOST_DRAFTS = 64
"""Limit of drafts per sequence and step; more cost more to verify than they can gain."""
LEAST_LOOKUP = 2
WHERE = "speculative_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: the model verifies several drafts in one forward pass. The output does not
    change. Raises: InvalidArgumentError.

    method:             ngram: drafts copy what followed an earlier occurrence of the last tokens;
                        draft_model: a smaller model with the same tokenizer drafts
    model:              the draft model: a local directory, a hub id or a .gguf file
    num_speculative_tokens: most drafts per sequence and step
    prompt_lookup_min, prompt_lookup_max: shortest and longest match of ngram, in tokens
    """

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int = option(8, low=1, high=MOST_DRAFTS)
    prompt_lookup_min: int = option(LEAST_LOOKUP, low=1, high=1024)
    prompt_lookup_max: int = option(5, low=1, high=1024)

    def __post_init__(self) -> None:
        check_choice(f"{WHERE}'s method", self.method, METHODS)
        check_options(self, label=WHERE + "'s {}")
        require(
            self.prompt_lookup_min <= self.prompt_lookup_max,
            f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max "
            f"{self.prompt_lookup_max}; lower it.",
            WHERE,
        )
        drafts = self.method == "draft_model"
        require(
            self.model is None or isinstance(self.model, str),
            f"{WHERE}'s model is {self.model!r}; pass a directory, a hub id or a .gguf file.",
            WHERE,
        )
        require(
            drafts == (self.model is not None),
            f"{WHERE} has method draft_model, but no model; name one with the same tokenizer."
            if drafts
            else f"{WHERE} names the model {self.model!r}, but method {self.method} uses none; leave it out, "
            "or pass method draft_model.",
            WHERE,
        )


def as_json(value: object) -> str | None:
    """Return the canonical JSON of a config, a dict or JSON; None for None and "".

    Raises: InvalidArgumentError.
    """
    if value is None or value == "":
        return None
    if isinstance(value, SpeculativeConfig):
        return json.dumps(asdict(value), sort_keys=True)
    try:
        given = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        given = None
    require(
        isinstance(given, Mapping),
        f'{WHERE} is {value!r}; pass a dict, or JSON of one, such as \'{{"method": "ngram", '
        '"num_speculative_tokens": 8}}\'.',
        WHERE,
    )
    assert isinstance(given, Mapping), "required"
    known = [each.name for each in fields(SpeculativeConfig)]
    unknown = [str(name) for name in given if name not in known]
    require(
        not unknown,
        f"{WHERE} has unknown fields {', '.join(unknown)}; its fields are {', '.join(known)}.",
        WHERE,
    )
    chosen: dict[str, Any] = dict(given)
    if "prompt_lookup_max" in chosen and "prompt_lookup_min" not in chosen:
        most = chosen["prompt_lookup_max"]
        if isinstance(most, int):
            chosen["prompt_lookup_min"] = max(1, min(LEAST_LOOKUP, most))
    return as_json(SpeculativeConfig(**chosen))


def from_json(value: str | None) -> SpeculativeConfig | None:
    """Return the config in the JSON of as_json."""
    return None if value is None else SpeculativeConfig(**parse_json(value))
