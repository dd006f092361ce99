"""What a beam search is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvreclaim.checks import require
from kvreclaim.options import MAX_COUNT, check_options, option
from kvreclaim.sampling_params import SamplingParams

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A search for the likeliest outputs of one prompt; vLLM's names where it has them, transformers' meaning
    of all. Raises: InvalidArgumentError.

    beam_width:     outputs in the making (num_beams)
    max_tokens:     of an output
    length_penalty: an output's score is its log-probability over its length, in tokens that were generated,
                    to this power: above 0 longer ones are preferred
    early_stopping: True: it ends with beam_width finished outputs; False: when the best unfinished one, at
                    its present length, is no better than the worst of these; "never": at the length that
                    would suit it best
    num_return_sequences: the best so many of beam_width come back
    ignore_eos:     the model ends no output
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
            f"num_return_sequences is {self.num_return_sequences}, but beam_width is {self.beam_width}; no "
            "more than that come out of the search: lower it, or raise beam_width.",
            "num_return_sequences",
        )

    @property
    def sampling(self) -> SamplingParams:
        """What else of a request goes by these."""
        return SamplingParams(
            n=self.num_return_sequences, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )
