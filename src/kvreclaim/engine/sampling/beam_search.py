"""Beam search over log-probabilities: which outputs go on, and which are finished. Knows no cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.beams import BeamSearchParams

NOT_YET = -1e9
"""The log-probability of beams that are only copies of the first one: before the first token all are."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An output that will not change.

    cumulative: its log-probability; score: over its length to the power of length_penalty
    ended:      by an end-of-sequence token, its last; else by its length
    """

    token_ids: tuple[int, ...]
    cumulative: float
    score: float
    ended: bool


class BeamSearch:
    """One search, as transformers' generate makes it (5.x, `_beam_search`): its candidates are the best
    max(2, 1 + E) · k of k · V continuations, with k = beam_width and E end tokens.

    Args:
        params:     of the search
        max_tokens: at which outputs end, params' or fewer
        eos:        tokens that end an output
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos: frozenset[int]) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.eos = eos
        self.beams: list[tuple[int, ...]] = [()] * params.beam_width
        self.sums = [0.0] + [NOT_YET] * (params.beam_width - 1)
        self.finished: list[Hypothesis] = []
        self._is_open = True

    @staticmethod
    def num_candidates(beam_width: int, num_eos: int) -> int:
        """Candidates that a step chooses from."""
        return max(2, 1 + num_eos) * beam_width

    def step(self, logits: Tensor) -> list[tuple[int, int]]:
        """logits: [k, V] behind the k beams. Returns: the next beams, the best one first, each as a beam that
        it goes on from and a token; none if the search is over."""
        params, width = self.params, self.params.beam_width
        keep = self.num_candidates(width, len(self.eos))
        every = torch.log_softmax(logits.float(), -1)
        every += torch.tensor(self.sums, device=every.device)[:, None]
        top = every.view(-1).topk(keep)
        vocab = logits.shape[-1]
        candidates = [
            (*divmod(place, vocab), total)
            for place, total in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        length = len(self.beams[0]) + 1
        is_last = length >= self.max_tokens
        stops = [is_last or token in self.eos for _, token, _ in candidates]
        was_full = len(self.finished) == width
        if self._is_open and not (params.early_stopping is True and was_full):
            self._finish(
                [each for each, stop in zip(candidates[:width], stops, strict=False) if stop], length
            )
        live = [each for each, stop in zip(candidates, stops, strict=True) if not stop][:width]
        if not live or self._is_over(live[0][2], length):
            return []
        self.beams = [(*self.beams[beam], token) for beam, token, _ in live]
        self.sums = [total for _, _, total in live]
        return [(beam, token) for beam, token, _ in live]

    def best(self) -> list[Hypothesis]:
        """Return the num_return_sequences best finished beams, the best one first."""
        return self.finished[: self.params.num_return_sequences]

    def _finish(self, ended: list[tuple[int, int, float]], length: int) -> None:
        """Add finished beams, and keep the best, as many as there are beams."""
        norm = length**self.params.length_penalty
        self.finished += [
            Hypothesis((*self.beams[beam], token), total, total / norm, token in self.eos)
            for beam, token, total in ended
        ]
        self.finished.sort(key=lambda each: -each.score)
        del self.finished[self.params.beam_width :]

    def _is_over(self, best: float, length: int) -> bool:
        """Return whether no better beam can follow. best: log-probability of the best unfinished beam."""
        params = self.params
        is_full = len(self.finished) == params.beam_width
        if is_full:
            longest = params.early_stopping == "never" and params.length_penalty > 0
            bound = best / (self.max_tokens if longest else length) ** params.length_penalty
            self._is_open = self._is_open and bound > self.finished[-1].score
        return not self._is_open or (params.early_stopping is True and is_full)
