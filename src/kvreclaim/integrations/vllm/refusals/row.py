"""Rows of the plugin's refusals, and the function that walks them.

The engine's table (kvreclaim.refusals) has pairs of named features. Here a row holds of one object of vLLM: a
VllmConfig, the spec of a group of layers, a layer. So a row has a predicate, which also words the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.integrations.vllm.refusals.predicates import Predicate
from kvreclaim.integrations.vllm.settings.enabled import KEY

OTHER_MODEL = "take a model with ordinary attention in every layer"
ELSE = f"or leave {KEY} out"


@dataclass(frozen=True, slots=True)
class ConfigRefusal:
    """find: what is refused; why and remedy: the rest of the message."""

    find: Predicate
    why: str
    remedy: str
    error: type[Exception]


def rows(
    texts: Mapping[Predicate, str], remedy: str = "remove it", error: type[Exception] = InvalidArgumentError
) -> tuple[ConfigRefusal, ...]:
    """Make rows of texts "why; remedy", or "why" with the usual remedy."""
    parts = {find: text.partition("; ") for find, text in texts.items()}
    return tuple(ConfigRefusal(find, why, own or remedy, error) for find, (why, _, own) in parts.items())


def model_rows(texts: Mapping[Predicate, str]) -> tuple[ConfigRefusal, ...]:
    """Make rows of properties of the model itself."""
    return rows(texts, OTHER_MODEL, UnsupportedModelError)


def refuse(table: Iterable[ConfigRefusal], subject: object, where: str = "", option: str = KEY) -> None:
    """Raise the error of the first row that finds something. where: follows what it finds."""
    for row in table:
        found = row.find(subject)
        if found:
            raise row.error(
                f"{option} does not work with {found}{where}: {row.why}; {row.remedy}, or leave {option} out."
            )
