"""Options of a beam search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvreclaim.checks import require
from kvreclaim.options import MAX_COUNT, check_options, option
from kvreclaim.sampling_params import SamplingParams

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Options of a beam search, with vLLM's names where it has them and transformers' meanings. Raises:
    InvalidArgumentError.

    beam_width:     unfinished outputs at a time (num_beams)
    max_tokens:     most tokens of an output
    length_penalty: score = log-probability / length ** length_penalty; the length counts generated tokens.
                    Above 0, longer outputs are preferred
    early_stopping: True: stop at beam_width finished outputs; False: stop when the best unfinished one, at
                    its present length, is no better than the worst finished one; "never": the same, at the
                    length that favours it most
    num_return_sequences: number of outputs returned, at most beam_width
    ignore_eos:     only max_tokens ends an output
    """

    beam_width: int = option(4, low=1)
    max_tokens: int = option(16, low=1, high=MAX_COUNT)
    length_penalty: float = option(1.0, low=-20.0, high=20.0)
    early_stopping: EarlyStopping = False
    num_return_sequences: int = option(1, low=1)
    ignore_eos: bool = option(False)

    def __post_init__(self) -> None:
        check_options(self)
        require(
            isinstance(self.early_stopping, bool) or self.early_stopping == "never",
            f"early_stopping is {self.early_stopping!r}; pass True, False or 'never'.",
            "early_stopping",
        )
        require(
            self.num_return_sequences <= self.beam_width,
            f"num_return_sequences is {self.num_return_sequences}, but beam_width is {self.beam_width}, and "
            "a search returns no more; lower it, or raise beam_width.",
            "num_return_sequences",
        )

    @property
    def sampling(self) -> SamplingParams:
        """Return the limits as SamplingParams, for the rest of the engine."""
        return SamplingParams(
            n=self.num_return_sequences, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )
