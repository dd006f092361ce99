"""What compression lost on held-out documents, by length and content, and the budgets that it promises.

A document's need is the smallest measured budget at and above which it loses no more than allowed. The
budget promised is the conformal quantile of the needs: 95 % of further documents like these need no more.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from statistics import median
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from safetensors import SafetensorError, safe_open

from kvreclaim.compression.conformal import LEAST_VALUES, conformal_quantile
from kvreclaim.errors import InvalidArgumentError

STATS_HEADER = "kvreclaim"
"""Key of the metadata in a statistics file."""
CONTINUED = 128
"""Tokens that are scored behind a document of prose: what follows a compressed text."""
MEASURE_CURVE = "run `kvreclaim calibrate --curve 1024,2048` for this model"
Share = Annotated[float, Field(ge=0, le=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LossCell(_Frozen):
    """Documents of one content and length under each budget.

    num_tokens: of a document in the cache when it is compressed, and so the budget that keeps everything
    right:      probability of an answer with the full cache, mean over answers and documents
    budgets:    tokens per layer and KV head, rising
    losses:     by document and budget, by how much that falls with the compressed cache; 0 where it rises
    """

    content: str
    num_tokens: PositiveInt
    right: Share
    budgets: tuple[PositiveInt, ...] = Field(min_length=1)
    losses: tuple[tuple[Share, ...], ...] = Field(min_length=LEAST_VALUES)

    @model_validator(mode="after")
    def _check(self) -> LossCell:
        rising = all(low < high for low, high in itertools.pairwise((*self.budgets, self.num_tokens)))
        if not rising or any(len(row) != len(self.budgets) for row in self.losses):
            raise ValueError("budgets must rise to less than the document, with one loss of each document")
        return self

    def need(self, losses: Sequence[float], max_loss: float) -> int:
        """The smallest budget at and above which a document with these losses loses no more."""
        need = self.num_tokens
        for budget, loss in zip(reversed(self.budgets), reversed(losses), strict=True):
            if loss > max_loss:
                break
            need = budget
        return need

    def promised(self, max_loss: float) -> int:
        """The budget at which 95 % of further documents lose no more; num_tokens: only the whole cache."""
        return conformal_quantile([self.need(losses, max_loss) for losses in self.losses])

    def summary(self, budget: int) -> tuple[float, float]:
        """Median loss at a measured budget, and what 95 % of further documents do not exceed."""
        losses = [row[self.budgets.index(budget)] for row in self.losses]
        return median(losses), conformal_quantile(losses)


class LossCurve(_Frozen):
    """Every content at every length, under one policy and the default settings of a compression."""

    policy: str
    cells: tuple[LossCell, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> LossCurve:
        places = {(cell.content, cell.num_tokens) for cell in self.cells}
        if not len(places) == len(self.cells) == len(self.contents) * len(self.lengths):
            raise ValueError("a curve has one cell of every content at every length")
        return self

    @property
    def contents(self) -> tuple[str, ...]:
        """In the order in which they were measured."""
        return tuple(dict.fromkeys(cell.content for cell in self.cells))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rising."""
        return tuple(sorted({cell.num_tokens for cell in self.cells}))

    def promised(self, max_loss: float, num_tokens: int, content: str | None = None) -> int | None:
        """The budget of a prompt of this length; None: everything must stay.

        Between two lengths it is the budget of the longer one, which is safe if longer documents need no
        fewer tokens. Nothing is promised beyond the longest: everything stays there.
        content: None takes the largest budget of all contents

        Raises: InvalidArgumentError for an unknown content.
        """
        if content is not None and content not in self.contents:
            raise InvalidArgumentError(
                f"content is {content!r}, and the loss was measured on {', '.join(self.contents)}; name one "
                "of them, or leave content out for the strictest.",
                field="content",
            )
        length = next((length for length in self.lengths if length >= num_tokens), None)
        if length is None:
            return None
        cells = [cell for cell in self.cells if cell.num_tokens == length]
        budget = max(cell.promised(max_loss) for cell in cells if content in (None, cell.content))
        return None if budget == length else budget


def read_curve(path: str | os.PathLike[str]) -> LossCurve:
    """The curve in a statistics file, without its tensors. Raises: InvalidArgumentError."""
    try:
        with safe_open(path, framework="numpy") as file:
            found = json.loads((file.metadata() or {})[STATS_HEADER])["curve"]
        if found is not None:
            return LossCurve.model_validate(found)
    except KeyError:
        pass
    except (OSError, SafetensorError, ValidationError, ValueError) as error:
        raise InvalidArgumentError(
            f"statistics file {os.fspath(path)!r} cannot be read ({error}); {MEASURE_CURVE}."
        ) from error
    raise InvalidArgumentError(f"statistics file {os.fspath(path)!r} holds no loss curve; {MEASURE_CURVE}.")
