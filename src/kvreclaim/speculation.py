"""What an engine is told about drafts: vLLM's names where it has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvreclaim.checks import check_choice, parse_json, require
from kvreclaim.options import check_options, option

METHODS = ("ngram", "draft_model")
MOST_DRAFTS = 64
"""Rows of a sequence in a step beside its own: beyond, verifying costs more than it can bring."""
LEAST_LOOKUP = 2
WHERE = "speculative_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed that the model then checks, several in one forward pass. What comes out is what
    would have come out without. Raises: InvalidArgumentError.

    method:             ngram: what followed the last tokens where they stood before, in prompt or output;
                        draft_model: what a smaller model with the same tokenizer says
    model:              of draft_model: a local directory, a hub id or a .gguf file
    num_speculative_tokens: guessed at most for a sequence in a step
    prompt_lookup_min, prompt_lookup_max: of ngram: tokens that must have stood there before, at least, and
                        that are compared at most
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
            f"{WHERE}'s model is {self.model!r}; pass a directory or a hub id.",
            WHERE,
        )
        require(
            drafts == (self.model is not None),
            f"{WHERE} has method draft_model, but no model; name one with the same tokenizer."
            if drafts
            else f"{WHERE} names the model {self.model!r}, but method {self.method} asks none; leave it out, "
            "or pass method draft_model.",
            WHERE,
        )


def as_json(said: object) -> str | None:
    """A config, a dict or JSON of one, in one way of writing; None where nothing is said.

    Raises: InvalidArgumentError.
    """
    if said is None or said == "":
        return None
    if isinstance(said, SpeculativeConfig):
        return json.dumps(asdict(said), sort_keys=True)
    try:
        given = parse_json(said) if isinstance(said, str) else said
    except ValueError:
        given = None
    require(
        isinstance(given, Mapping),
        f'{WHERE} is {said!r}; pass a dict, or JSON of one, such as \'{{"method": "ngram", '
        '"num_speculative_tokens": 8}}\'.',
        WHERE,
    )
    assert isinstance(given, Mapping), "required"
    known = [each.name for each in fields(SpeculativeConfig)]
    unknown = [str(name) for name in given if name not in known]
    require(not unknown, f"{WHERE} holds {', '.join(unknown)}; its fields are {', '.join(known)}.", WHERE)
    chosen: dict[str, Any] = dict(given)
    if "prompt_lookup_max" in chosen and "prompt_lookup_min" not in chosen:
        most = chosen["prompt_lookup_max"]
        if isinstance(most, int):
            chosen["prompt_lookup_min"] = max(1, min(LEAST_LOOKUP, most))
    return as_json(SpeculativeConfig(**chosen))


def from_json(said: str | None) -> SpeculativeConfig | None:
    """What as_json has written."""
    return None if said is None else SpeculativeConfig(**parse_json(said))
