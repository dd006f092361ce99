"""KVzip: attention while the model repeats its context."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal


@dataclass(frozen=True)
class KVzip(CompressionPolicy):
    """Keeps the tokens that the model attends to while it repeats the prompt. They serve questions that are
    not known yet:

        score_j = max over the repetition's queries, and the query heads of the KV head, of softmax_j(s q.K)

    The softmax runs over the whole prompt and the repetition so far (as published: over a part of the prompt
    at a time). Scores are comparable between layers and heads: use shares(kvzip).

    Paper: arXiv 2505.23416.

    Compresses once, at the end of the prompt, which must fit into the pool; generated tokens stay.
    Cost: the prompt is computed once more, over twice as many tokens, with softmax in fp32: several times as
    long as the prompt itself; state: one number per token, during the pass.
    """

    name = "kvzip"
    any_layers = True
    needs = frozenset({Signal.READ_AGAIN})
    prompt_only = True

    def score(self, view: LayerView) -> Tensor:
        assert view.signals.read_again is not None, f"layer {view.layer}: the prompt was not read again"
        return view.signals.read_again
