"""Forward passes beside the engine's own: they show each layer's queries, or what these pay attention to, and
store nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from kvreclaim.ops.scoring import MAX_LOGITS

OnQueries = Callable[[int, Tensor], None]
OnReached = Callable[[int, Tensor, Tensor, Tensor], None]
OnCached = Callable[[int], tuple[Tensor, Tensor]]
NEAR = 64
"""Tokens back; what a query pays those is not asked for: every text reads what it has just said."""
_ROWS = 512
REREAD_TOKENS = 1024
_WHOLE = "\n\nRepeat the previous context:\n"
_PART = "\n\nRepeat the part of the previous context starting with: "
_CUE_TOKENS = 8


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
        softmax, keys, values = self.facts.layers[call.layer].softmax, *_by_head(call)
        out, reached = _attend_and_watch(call.q, keys, values, softmax, self.length, NEAR)
        self.on_reached(call.layer, keys[:, : self.length], values[:, : self.length], reached)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Again:
    """A KVBatch over tokens behind a context whose keys and values are cached; its own are not stored.

    best: of each layer, the most that the context's tokens have been paid so far, if anything
    """

    facts: ModelFacts
    cached: OnCached
    best: dict[int, Tensor]

    def attend(self, call: AttentionCall) -> Tensor:
        held = self.cached(call.layer)
        keys, values = (
            torch.cat([a.float(), b.float()], 1) for a, b in zip(held, _by_head(call), strict=True)
        )
        softmax, length = self.facts.layers[call.layer].softmax, held[0].shape[1]
        out, paid = _attend_and_watch(call.q, keys, values, softmax, length, 0)
        self.best[call.layer] = torch.maximum(self.best.get(call.layer, paid), paid)
        return out


def _by_head(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Its keys [K, T, D] and values [K, T, Dv]."""
    return call.k.transpose(0, 1), call.v.transpose(0, 1)


def _attend_and_watch(
    q: Tensor, keys: Tensor, values: Tensor, softmax: Softmax, watched: int, near: int
) -> tuple[Tensor, Tensor]:
    """q [N, H, D] of the last N of T tokens, keys [K, T, D], values [K, T, Dv]: what they attend to,
    [N, H, Dv] in q's dtype, and [K, watched] fp32 the most that a query more than `near` tokens later pays
    each of the first tokens."""
    keys, values = keys.float(), values.float()
    heads, group, num_keys = len(keys), q.shape[1] // len(keys), keys.shape[1]
    before = num_keys - len(q)
    columns = torch.arange(num_keys, device=q.device)
    reached, parts = keys.new_zeros(heads, watched), []
    for rows in columns[: len(q)].split(max(1, min(_ROWS, MAX_LOGITS // (q.shape[1] * num_keys)))):
        seen = before + int(rows[-1]) + 1
        ahead = before + rows[:, None] - columns[:seen]
        mask = ahead >= 0
        if softmax.window is not None:
            mask &= ahead < softmax.window
        paid = probabilities(q[rows][None].float(), keys[None, :, :seen], mask[None, None], softmax)[0]
        out = (paid @ values[:, :seen]).unflatten(1, (group, -1))
        parts.append(out.permute(2, 0, 1, 3).flatten(1, 2))
        far = paid.unflatten(1, (group, -1))[..., :watched] * (ahead[:, :watched] > near)
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


@torch.inference_mode()
def read_again(loaded: LoadedModel, context: list[int], cached: OnCached) -> list[Tensor]:
    """Have the model repeat a context of which it holds keys and values: what is looked at for that is what a
    question that is not known yet may need.

    Behind the context stand an instruction and the context itself, REREAD_TOKENS at a time, each time at the
    position where the context ends. A model without a tokenizer gets no instruction.

    Args:
        context: T token ids
        cached:  layer -> the context's keys [K, T, D], rotated, and values [K, T, Dv]

    Returns: per layer [K, T] fp32, the most that any of these queries pays a token of the context, over the
        query heads of its KV head. Memory: activations of REREAD_TOKENS tokens.
    Raises: InvalidArgumentError if the model has no position left behind the context.
    Source: arXiv 2505.23416, with softmax over the whole context instead of a part of it.
    """
    best: dict[int, Tensor] = {}
    device, length = loaded.facts.device, len(context)
    for tokens in _repetitions(loaded, context):
        loaded.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.arange(length, length + len(tokens), device=device)[None],
            use_cache=False,
            logits_to_keep=1,
            kv_batch=_Again(loaded.facts, cached, best),
        )
    return [best[layer] for layer in range(loaded.facts.num_layers)]


def _repetitions(loaded: LoadedModel, context: list[int]) -> Iterator[list[int]]:
    """The instruction and a part of the context, each time as much as there are positions for."""
    start, most = 0, loaded.facts.max_position
    while start < len(context):
        asked = _instruction(loaded, context[max(0, start - _CUE_TOKENS) : start])
        size = min(REREAD_TOKENS, most - len(context) - len(asked))
        if size < 1:
            raise InvalidArgumentError(
                f"a prompt of {len(context)} tokens cannot be repeated by {loaded.facts.name!r}, which has "
                f"{most} positions; shorten it, or use another policy than kvzip."
            )
        yield asked + context[start : start + size]
        start += size


def _instruction(loaded: LoadedModel, cue: list[int]) -> list[int]:
    """What asks for a part of the context. cue: the tokens before it; empty at the beginning."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        return []
    if not cue:
        return list(tokenizer.encode(_WHOLE, add_special_tokens=False))
    words, end = (tokenizer.encode(text, add_special_tokens=False) for text in (_PART, "\n"))
    return [*words, *cue, *end]
