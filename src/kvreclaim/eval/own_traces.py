"""Continuations by the model itself, with the full cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.passages import Passages
from kvreclaim.eval.task import SEED_STRIDE, Item
from kvreclaim.sampling_params import SamplingParams

TEMPERATURE = 0.7
"""Greedy traces of small models soon repeat themselves."""


@dataclass(frozen=True)
class OwnTraces:
    """A passage of num_tokens / 2 tokens, continued by the model to num_tokens: drawn at TEMPERATURE, by the
    full cache, past its end token."""

    llm: LLM = field(repr=False)
    passages: Passages = field(repr=False)
    num_tokens: int
    seeded = True
    _drawn: dict[int, Item] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"text": self.passages.digest, "own": TEMPERATURE, "num_tokens": self.num_tokens}

    def num_examples(self, wanted: int) -> int:
        return wanted

    def item(self, seed: int, index: int) -> Item:
        number = seed * SEED_STRIDE + index
        if number not in self._drawn:
            self._drawn[number] = self._draw(number)
        return self._drawn[number]

    def _draw(self, number: int) -> Item:
        prefix = self.passages.prefix
        prompt = [*prefix, *self.passages.window(number, self.num_tokens // 2 - len(prefix))]
        params = SamplingParams(
            temperature=TEMPERATURE,
            max_tokens=self.num_tokens - len(prompt),
            ignore_eos=True,
            seed=number,
        )
        (out,) = self.llm.generate([prompt], params)
        return Item(tuple(prompt), tuple(out.outputs[0].token_ids))
