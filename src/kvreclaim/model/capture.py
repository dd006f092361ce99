"""One forward pass that shows each layer's queries before rotation, and keeps none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.reference import causal_attention
from kvreclaim.ops.rope import rotate

OnQueries = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Capture:
    """A KVBatch over whole documents: causal attention inside each, no cache.

    Queries reach an attention function after q_norm and rotation, at known positions; turning them
    back gives the pre-RoPE query exactly, for every model that the probe has understood.
    """

    facts: ModelFacts
    lengths: list[int]
    positions: Tensor
    on_queries: OnQueries
    rotated: bool

    def attend(self, call: AttentionCall) -> Tensor:
        self.on_queries(call.layer, self._shown(call))
        parts = zip(
            call.q.split(self.lengths), call.k.split(self.lengths), call.v.split(self.lengths), strict=True
        )
        softmax = self.facts.layers[call.layer].softmax
        return torch.cat([causal_attention(q, k, v, softmax) for q, k, v in parts])

    def _shown(self, call: AttentionCall) -> Tensor:
        queries = call.q.transpose(0, 1)
        if self.rotated:
            return queries
        rope = self.facts.layers[call.layer].rope
        assert rope is not None, f"layer {call.layer}: {self.facts.rope_problem}"
        return rotate(queries.float(), self.positions, rope, inverse=True)


@torch.inference_mode()
def capture_queries(
    loaded: LoadedModel, documents: list[list[int]], on_queries: OnQueries, *, rotated: bool = False
) -> None:
    """Run the model once over all documents and hand each layer's queries to the callback.

    Args:
        documents:  token ids; each starts at position 0 and sees itself only
        on_queries: (layer, queries [H, T, D] fp32 before rotation, T = tokens of all documents);
                    called in the order of the layers; queries are not kept
        rotated:    hand them over as attention sees them instead, in the model's dtype

    Memory: activations of T tokens and the queries of one layer.
    Raises: InvalidArgumentError if there is no document, or one of them is empty.
    """
    if not documents or not all(documents):
        raise InvalidArgumentError(
            "a document is empty, or there is none; pass some of at least one token each."
        )
    lengths = [len(document) for document in documents]
    device = loaded.facts.device
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    tokens = torch.tensor([[token for document in documents for token in document]], device=device)
    loaded.model(
        input_ids=tokens,
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=1,
        kv_batch=_Capture(loaded.facts, lengths, positions, on_queries, rotated),
    )
