"""Forward passes that show each layer's queries, or what they pay attention to, and keep none of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.dense import probabilities
from kvreclaim.ops.facts import ModelFacts, Softmax
from kvreclaim.ops.reference import causal_attention
from kvreclaim.ops.rope import rotate

OnQueries = Callable[[int, Tensor], None]
OnReached = Callable[[int, Tensor, Tensor, Tensor], None]
NEAR = 64
"""Tokens back; what a query pays those is not asked for: every text reads what it has just said."""
_ROWS = 512


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


@dataclass(frozen=True, slots=True, eq=False)
class _Twice:
    """A KVBatch over one document said twice: causal attention, no cache."""

    facts: ModelFacts
    length: int
    on_reached: OnReached

    def attend(self, call: AttentionCall) -> Tensor:
        out, reached = _attend_and_watch(
            call.q, call.k, call.v, self.facts.layers[call.layer].softmax, self.length
        )
        first = slice(self.length)
        self.on_reached(call.layer, call.k[first].transpose(0, 1), call.v[first].transpose(0, 1), reached)
        return out


def _attend_and_watch(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, watched: int
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, K, D], v [T, K, Dv]: what they attend to, [T, H, Dv] in q's dtype, and [K, watched]
    fp32 the most that a query more than NEAR tokens later pays each of the first tokens."""
    keys, values = k.transpose(0, 1).float(), v.transpose(0, 1).float()
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    columns = torch.arange(q.shape[0], device=q.device)
    reached, parts = keys.new_zeros(heads, watched), []
    for rows in columns.split(_ROWS):
        seen = int(rows[-1]) + 1
        ahead = rows[:, None] - columns[:seen]
        mask = ahead >= 0
        if softmax.window is not None:
            mask &= ahead < softmax.window
        paid = probabilities(q[rows][None].float(), keys[None, :, :seen], mask[None, None], softmax)[0]
        out = (paid @ values[:, :seen]).unflatten(1, (group, -1))
        parts.append(out.permute(2, 0, 1, 3).flatten(1, 2))
        far = paid.unflatten(1, (group, -1))[..., :watched] * (ahead[:, :watched] > NEAR)
        width = far.shape[-1]
        reached[:, :width] = torch.maximum(reached[:, :width], far.amax(dim=(1, 2)))
    return torch.cat(parts).to(q.dtype), reached


@torch.inference_mode()
def say_twice(loaded: LoadedModel, document: list[int], on_reached: OnReached) -> None:
    """Run the model over a document and the same document again, without a word between.

    Args:
        document:   n token ids, more than NEAR, at most half of what the model has positions for
        on_reached: (layer, keys [K, n, D] rotated, values [K, n, Dv], reached [K, n] fp32) of the first copy;
                    reached: the most that a query of a later token pays it, over the query heads of its KV
                    head. Called in the order of the layers; nothing is kept

    Raises: InvalidArgumentError if the document is too short or too long.
    """
    length, most = len(document), loaded.facts.max_position // 2
    if not NEAR < length <= most:
        raise InvalidArgumentError(
            f"a document of {length} tokens cannot be said twice to {loaded.facts.name!r}; "
            f"pass {NEAR + 1} to {most} tokens."
        )
    device = loaded.facts.device
    loaded.model(
        input_ids=torch.tensor([document * 2], device=device),
        position_ids=torch.arange(2 * length, device=device)[None],
        use_cache=False,
        logits_to_keep=1,
        kv_batch=_Twice(loaded.facts, length, on_reached),
    )
