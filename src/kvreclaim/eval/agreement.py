"""Distance between next-token distributions and the full cache's, on any text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.eval.task import Answer, Item, Metric, TaskScore
from kvreclaim.eval.windows import WindowTask

ROW_BYTES = 64 * 2**20
"""Most bytes of one example's full-cache log-probabilities; longer examples are judged at evenly spaced
positions."""


@dataclass(frozen=True)
class Agreement(WindowTask):
    """KL divergence D(full || compressed) in nats and top-1 agreement of the next-token distributions over
    the end of every window, teacher-forced; both caches are run now.

    value: share of positions with the same most likely token; extra: kl, mean over an example's positions
    """

    metric = Metric.AGREEMENT
    compares = True

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        sums = answer.compared
        return TaskScore(sums["agree"], sums["places"], extra={"kl": sums["kl"] / sums["places"]})


class FullRows:
    """The full cache's log-probability rows of one example, at every stride-th position, [places, V] fp32.

    An observer as Scores.observer. Oracle of what is kept: LLM.score's own logprobs.
    """

    def __init__(self, num_places: int, vocab_size: int) -> None:
        self.stride = -(-num_places * vocab_size * 4 // ROW_BYTES)
        self.rows: dict[int, Tensor] = {}

    def __call__(self, first: int, rows: Tensor) -> None:
        for place in places(first, len(rows), self.stride):
            self.rows[place] = rows[place - first].clone()


class Divergence:
    """Sums of KL(full || observed rows) and of agreement with the full cache's rows."""

    def __init__(self, full: FullRows) -> None:
        self.full = full
        self.by_place: dict[int, tuple[float, bool]] = {}

    def __call__(self, first: int, rows: Tensor) -> None:
        chosen = places(first, len(rows), self.full.stride)
        if not chosen:
            return
        ours = rows[[place - first for place in chosen]].double()
        theirs = torch.stack([self.full.rows[place] for place in chosen]).double()
        kl = torch.where(theirs > -torch.inf, theirs.exp() * (theirs - ours), 0.0).sum(-1).clamp_min(0.0)
        same = ours.argmax(-1) == theirs.argmax(-1)
        self.by_place |= dict(zip(chosen, zip(kl.tolist(), same.tolist(), strict=True), strict=True))

    def sums(self) -> dict[str, float]:
        """kl in nats, agree and places, summed over the judged positions."""
        kls, same = zip(*self.by_place.values(), strict=True)
        return {"kl": sum(kls), "agree": float(sum(same)), "places": float(len(same))}


def places(first: int, count: int, stride: int) -> range:
    """Multiples of stride among first .. first + count - 1."""
    return range(-(-first // stride) * stride, first + count, stride)
