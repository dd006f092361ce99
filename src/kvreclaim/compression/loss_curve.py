"""Loss of compression on held-out documents, by KV cache dtype, length and content, and the budgets that
follow from it.

A document's need is the smallest measured budget at and above which it loses no more than allowed. The
promised budget is the conformal quantile of the needs: 95 % of further similar documents need no more.
Losses are against the full cache in the model's dtype, so the rounding of a coded cache counts.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from safetensors import SafetensorError, safe_open

from kvreclaim.checks import require
from kvreclaim.compression.conformal import LEAST_VALUES, conformal_quantile
from kvreclaim.compression_settings import AUTO
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
    """Documents of one content and length in one KV cache dtype under each budget.

    num_tokens:     of a document in the cache when it is compressed
    right:          probability of an answer with the full cache in the model's dtype, mean over answers and
                    documents
    kv_cache_dtype: "auto" is the model's dtype
    density:        tokens that take the bytes of one in the model's dtype (KVBytes.density)
    budgets:        tokens per layer and KV head, rising; the last is num_tokens, all of them, but in the
                    model's dtype, which loses nothing there
    losses:         by document and budget, the fall of that probability; 0 where it rises
    """

    content: str
    num_tokens: PositiveInt
    right: Share
    kv_cache_dtype: str = AUTO
    density: float = Field(default=1.0, gt=0)
    budgets: tuple[PositiveInt, ...] = Field(min_length=1)
    losses: tuple[tuple[Share, ...], ...] = Field(min_length=LEAST_VALUES)

    @model_validator(mode="after")
    def _check(self) -> LossCell:
        has_all = self.budgets[-1] == self.num_tokens
        steps = self.budgets if has_all else (*self.budgets, self.num_tokens)
        rising = all(low < high for low, high in itertools.pairwise(steps))
        if not rising or any(len(row) != len(self.budgets) for row in self.losses):
            raise ValueError("budgets must rise to no more than the document, with one loss of each document")
        if has_all == (self.kv_cache_dtype == AUTO):
            raise ValueError("all tokens are a budget, but not in the model's dtype")
        return self

    def need(self, losses: Sequence[float], max_loss: float) -> float:
        """Return the smallest budget at and above which a document with these losses loses no more; math.inf
        if even all tokens in this format lose more."""
        need = self.num_tokens if self.kv_cache_dtype == AUTO else math.inf
        for budget, loss in zip(reversed(self.budgets), reversed(losses), strict=True):
            if loss > max_loss:
                break
            need = budget
        return need

    def promised(self, max_loss: float) -> float:
        """Return the budget at which 95 % of further documents lose no more; num_tokens: all tokens;
        math.inf: no budget in this format."""
        return conformal_quantile([self.need(losses, max_loss) for losses in self.losses])

    def share(self, budget: float) -> float:
        """Return a budget's share of the document's bytes in the model's dtype."""
        return budget / self.num_tokens / self.density

    def bound_within(self, share: float) -> float | None:
        """Return the loss that 95 % of further documents do not exceed, at the largest budget within this
        share of the bytes; None if no budget is that small."""
        fits = [at for at, budget in enumerate(self.budgets) if self.share(budget) <= share]
        return conformal_quantile([row[fits[-1]] for row in self.losses]) if fits else None


class LossCurve(_Frozen):
    """Cells of every content at every length in every KV cache dtype, under one policy and the default
    compression settings."""

    policy: str
    cells: tuple[LossCell, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> LossCurve:
        places = {(cell.content, cell.num_tokens, cell.kv_cache_dtype) for cell in self.cells}
        grid = len(self.contents) * len(self.lengths) * len(self.formats)
        if not len(places) == len(self.cells) == grid:
            raise ValueError("a curve has one cell of every content at every length in every format")
        if AUTO not in self.formats:
            raise ValueError("a curve has the model's dtype among its formats")
        return self

    @property
    def contents(self) -> tuple[str, ...]:
        """Contents in the order of measurement."""
        return tuple(dict.fromkeys(cell.content for cell in self.cells))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Ascending lengths."""
        return tuple(sorted({cell.num_tokens for cell in self.cells}))

    @property
    def formats(self) -> tuple[str, ...]:
        """KV cache dtypes in the order of measurement."""
        return tuple(dict.fromkeys(cell.kv_cache_dtype for cell in self.cells))

    def promised(
        self, kv_cache_dtype: str, max_loss: float, num_tokens: int, content: str | None = None
    ) -> int | None:
        """Return the budget of a prompt of this length in this format; None: all tokens must stay.

        Between two lengths it is the budget of the longer one, which is safe if longer documents need no
        fewer tokens. Nothing is promised beyond the longest: everything stays there.
        content: None takes the largest budget of all contents

        Raises: InvalidArgumentError for an unknown content, a format that was not measured, and one in which
        even all tokens lose more at some length.
        """
        require(
            kv_cache_dtype in self.formats,
            f"max_loss is {max_loss}, but kv_cache_dtype is {kv_cache_dtype}, and losses are measured in "
            f"{', '.join(self.formats)}; take one of them, or measure it with `kvreclaim calibrate --curve "
            f"{','.join(map(str, self.lengths))} --curve-formats {','.join(self.formats)},{kv_cache_dtype}`.",
            "max_loss",
        )
        budgets = self._budgets(kv_cache_dtype, max_loss, content)
        require(
            math.inf not in budgets.values(),
            f"max_loss is {max_loss}, but keys and values in {kv_cache_dtype} lose more even if every token "
            "stays; allow more loss, or start with another kv_cache_dtype.",
            "max_loss",
        )
        length = next((length for length in self.lengths if length >= num_tokens), None)
        return None if length is None or budgets[length] == length else int(budgets[length])

    def best_format(self, max_loss: float, content: str | None) -> tuple[str, float]:
        """Return the KV cache dtype with the fewest bytes for the promised budgets, and their share of the
        prompt's bytes in the model's dtype, mean over the lengths; ties take the widest dtype."""
        densities = {cell.kv_cache_dtype: cell.density for cell in self.cells}

        def cost(form: str) -> tuple[float, float]:
            budgets = self._budgets(form, max_loss, content)
            share = fmean(budget / length for length, budget in budgets.items())
            return share / densities[form], densities[form]

        found = min(self.formats, key=cost)
        return found, cost(found)[0]

    def _budgets(self, kv_cache_dtype: str, max_loss: float, content: str | None) -> dict[int, float]:
        """Return LossCell.promised for the strictest content, by ascending length."""
        require(
            content is None or content in self.contents,
            f"content is {content!r}, and the loss was measured on {', '.join(self.contents)}; name one "
            "of them, or leave content out for the strictest.",
            "content",
        )
        found = dict.fromkeys(self.lengths, 0.0)
        for cell in self.cells:
            if cell.kv_cache_dtype == kv_cache_dtype and content in (None, cell.content):
                found[cell.num_tokens] = max(found[cell.num_tokens], cell.promised(max_loss))
        return found


def read_curve(path: str | os.PathLike[str]) -> LossCurve:
    """Read the curve of a statistics file, without its tensors. Raises: InvalidArgumentError."""
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
