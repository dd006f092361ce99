"""Forward passes outside the engine's steps: they pass each layer's queries or attention weights to a
callback, or end at a layer, and store nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.facts import ModelFacts, Softmax
from kvreclaim.ops.reference import causal_attention
from kvreclaim.ops.rope import rotate
from kvreclaim.ops.scoring import MAX_LOGITS
from kvreclaim.ops.states import StateStep

OnQueries = Callable[[int, Tensor], None]
OnReached = Callable[[int, int, Tensor, Tensor, Tensor, Tensor | None], None]
OnCached = Callable[[int], tuple[Tensor, Tensor]]
NEAR = 64
"""Distance in tokens within which attention is ignored: every text attends to its most recent tokens."""
NOW = 3 / 4
"""Share of a first copy after which compression is assumed; the rest of the copy is its continuation."""
_TILE, _LEAST_ROWS = 1 << 21, 32
"""Logits of one tile on a CPU, 8 MiB that stay in cache; fewest rows that are worth a product."""
REREAD_TOKENS = 1024
_WHOLE = "\n\nRepeat the previous context:\n"
_PART = "\n\nRepeat the part of the previous context starting with: "
_CUE_TOKENS = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Capture:
    """A KVBatch over whole documents: causal attention inside each, no cache.

    Queries reach an attention function after q_norm and rotation, at known positions. The inverse rotation
    gives the pre-RoPE query exactly, for every model that the probe supports.

    lengths: of the documents; spans: computed tokens per document, 2 * length for a repeated one
    first:   mask of the rows in first copies; None if all rows are
    """

    facts: ModelFacts
    lengths: list[int]
    spans: list[int]
    positions: Tensor
    first: Tensor | None
    on_queries: OnQueries
    on_keys: OnQueries | None
    on_reached: OnReached | None
    rotated: bool

    def attend(self, call: AttentionCall) -> Tensor:
        self.on_queries(call.layer, self._shown(call.layer, call.q))
        if self.on_keys is not None:
            self.on_keys(call.layer, self._shown(call.layer, call.k))
        parts = zip(call.q.split(self.spans), call.k.split(self.spans), call.v.split(self.spans), strict=True)
        inputs = [None] * len(self.spans) if call.hidden is None else call.hidden.split(self.spans)
        found = (self._attend(call.layer, n, *part, hidden=inputs[n]) for n, part in enumerate(parts))
        return torch.cat(list(found))

    def _attend(self, layer: int, n: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        softmax, length = self.facts.layers[layer].softmax, self.lengths[n]
        if self.spans[n] == length:
            return causal_attention(q, k, v, softmax)
        assert self.on_reached is not None
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        parts = (now(length), length, 2 * length)
        out, reached = _attend_and_watch(q, keys, values, softmax, length, NEAR, parts)
        first = None if hidden is None else hidden[:length]
        self.on_reached(layer, n, keys[:, :length], values[:, :length], reached, first)
        return out

    def _shown(self, layer: int, rows: Tensor) -> Tensor:
        positions = self.positions
        if self.first is not None:
            rows, positions = rows[self.first], positions[self.first]
        heads = rows.transpose(0, 1)
        if self.rotated:
            return heads
        rope = self.facts.layers[layer].rope
        assert rope is not None, f"layer {layer}: {self.facts.rope_problem}"
        return rotate(heads.float(), positions, rope, inverse=True)


def can_say_twice(facts: ModelFacts, document: Sequence[int]) -> bool:
    """Return whether a document has tokens more than NEAR apart, and fits the model's positions twice."""
    return 2 * NEAR < len(document) <= facts.max_position // 2


def now(length: int) -> int:
    """Return the tokens of a first copy that precede its assumed compression."""
    return int(length * NOW)


@torch.inference_mode()
def capture_queries(
    loaded: LoadedModel,
    documents: Sequence[Sequence[int]],
    on_queries: OnQueries,
    *,
    rotated: bool = False,
    on_keys: OnQueries | None = None,
    on_reached: OnReached | None = None,
) -> None:
    """Run the model once over all documents and hand each layer's queries to the callback.

    Args:
        documents:  token ids; each starts at position 0 and sees itself only
        on_queries: (layer, queries [H, T, D] fp32 before rotation, T = tokens of all documents);
                    called in the order of the layers; queries are not kept
        rotated:    pass rotated queries instead, in the model's dtype
        on_keys:    if given, gets each layer's keys [K, T, D] in the same way
        on_reached: if given, each document for which can_say_twice holds is repeated, without a separator.
                    on_queries then gets the first copy's queries. Per layer and repeated document, this
                    gets (layer, document, keys [K, n, D] rotated, values [K, n, Dv], reached [3, K, n]
                    fp32, hidden [n, M] or None) of the first copy. reached is the largest attention weight
                    of a token for queries more than NEAR tokens later, over the query heads of its KV head:
                    queries of the first copy before now(n), those after it, and of the second copy. hidden
                    is the layer's input, where inputs.py hands it out. Nothing is kept

    Memory: activations of T tokens and the queries of one layer.
    Raises: InvalidArgumentError if there is no document, or one of them is empty.
    """
    if not documents or not all(documents):
        raise InvalidArgumentError(
            "a document is empty, or there is none; pass some of at least one token each."
        )
    twice = [on_reached is not None and can_say_twice(loaded.facts, document) for document in documents]
    texts = [list(d) * 2 if again else list(d) for d, again in zip(documents, twice, strict=True)]
    device = loaded.facts.device
    positions = torch.cat([torch.arange(len(text)) for text in texts]).to(device)
    firsts = [torch.arange(len(text)) < len(d) for text, d in zip(texts, documents, strict=True)]
    lengths = [len(text) for text in texts]
    batch = _Capture(
        loaded.facts,
        [len(document) for document in documents],
        lengths,
        positions,
        torch.cat(firsts).to(device) if any(twice) else None,
        on_queries,
        on_keys,
        on_reached,
        rotated,
    )
    with nullcontext() if loaded.recurrent is None else loaded.recurrent.beginning(lengths):
        loaded.model(
            input_ids=torch.tensor([[token for text in texts for token in text]], device=device),
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=1,
            kv_batch=batch,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Again:
    """A KVBatch over tokens after a cached context. Their own keys and values are not stored.

    best: layer -> the largest attention weight of each context token so far
    """

    facts: ModelFacts
    cached: OnCached
    best: dict[int, Tensor]

    def attend(self, call: AttentionCall) -> Tensor:
        held = self.cached(call.layer)
        keys, values = (
            torch.cat([a.to(b.dtype), b], 1)
            for a, b in zip(held, (call.k.transpose(0, 1), call.v.transpose(0, 1)), strict=True)
        )
        softmax, length = self.facts.layers[call.layer].softmax, held[0].shape[1]
        out, paid = _attend_and_watch(call.q, keys, values, softmax, length, 0, (len(call.q),))
        self.best[call.layer] = torch.maximum(self.best.get(call.layer, paid[0]), paid[0])
        return out


def _attend_and_watch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    softmax: Softmax,
    watched: int,
    near: int,
    parts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Attend q [N, H, D] of the last N of T tokens to keys [K, T, D] and values [K, T, Dv]. Returns: the
    output [N, H, Dv] in q's dtype, and [P, K, watched] fp32, the largest weight of each of the first tokens
    for queries more than `near` tokens later, by queries before each of the P ascending `parts`, the last of
    them N. Logits and softmax are fp32; values are weighed in their own dtype."""
    keys = keys.float()
    heads, group, num_keys = len(keys), q.shape[1] // len(keys), keys.shape[1]
    before, size = num_keys - len(q), _rows_at_once(q.shape[1] * num_keys, q.device)
    columns = torch.arange(num_keys, device=q.device)
    reached, outs = keys.new_zeros(len(parts), heads, watched), []
    for part, (begin, end) in enumerate(pairwise((0, *parts))):
        for rows in columns[begin:end].split(size):
            first, seen = before + int(rows[0]), before + int(rows[-1]) + 1
            ahead = before + rows[:, None] - columns[:seen]
            folded = q[rows].float().unflatten(1, (heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
            paid = _probabilities(folded, keys[:, :seen], ahead.repeat(group, 1), first, softmax)
            out = (paid.to(values.dtype) @ values[:, :seen]).unflatten(1, (group, -1))
            outs.append(out.permute(2, 0, 1, 3).flatten(1, 2))
            width, close = min(watched, seen), max(0, first - near)
            if close < width:  # columns within `near` of some rows
                paid[..., close:width] *= (ahead[:, close:width] > near).repeat(group, 1)
            own = reached[part, :, :width]
            torch.maximum(own, paid[..., :width].amax(dim=1), out=own)
    return torch.cat(outs).to(q.dtype), reached


def _rows_at_once(logits: int, device: torch.device) -> int:
    """Return the number of queries per tile. logits: logits of one query."""
    near = max(_LEAST_ROWS, _TILE // logits) if device.type == "cpu" else MAX_LOGITS
    return max(1, min(near, MAX_LOGITS // logits))


def _probabilities(q: Tensor, k: Tensor, ahead: Tensor, first: int, softmax: Softmax) -> Tensor:
    """Return softmax weights [K, R, C] of q [K, R, D] and k [K, C, D], all fp32. ahead: [R, C] rows' distance
    from earlier columns. Columns before `first` precede every row."""
    scores = (q * softmax.scale) @ k.transpose(1, 2)
    if softmax.softcap is not None:
        scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
    if softmax.window is not None:
        scores.masked_fill_(ahead >= softmax.window, float("-inf"))
    if softmax.chunk is not None:  # the first column is position 0
        scores.masked_fill_(ahead > ahead[:, :1] % softmax.chunk, float("-inf"))
    scores[..., first:].masked_fill_(ahead[:, first:] < 0, float("-inf"))
    if softmax.sinks is None:
        return torch.softmax(scores, dim=-1)
    rows = softmax.sinks.view(len(q), -1, 1)
    rows = rows.repeat_interleave(q.shape[1] // rows.shape[1], dim=1)
    return torch.softmax(torch.cat([scores, rows], dim=-1), dim=-1)[..., :-1]


@torch.inference_mode()
def read_again(
    loaded: LoadedModel, context: list[int], cached: OnCached, states: StateStep | None = None
) -> list[Tensor]:
    """Have the model repeat a cached context, and record the attention to its tokens, as an estimate of what
    later questions need.

    An instruction and the context follow the context, REREAD_TOKENS at a time, each time at the position
    where the context ends. A model without a tokenizer gets no instruction.

    Args:
        context: T token ids
        cached:  layer -> the context's keys [K, T, D], rotated, and values [K, T, Dv]
        states:  for recurrent layers, a step that starts from the context's state

    Returns: per layer [K, T] fp32, the largest attention weight of each context token, over these queries and
        the query heads of its KV head. Memory: activations of REREAD_TOKENS tokens.
    Raises: InvalidArgumentError if the model has no position left behind the context.
    Source: arXiv 2505.23416, with softmax over the whole context instead of a part of it.
    """
    best: dict[int, Tensor] = {}
    device, length = loaded.facts.device, len(context)
    for tokens in _repetitions(loaded, context):
        with _going_on(loaded, states):
            loaded.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.arange(length, length + len(tokens), device=device)[None],
                use_cache=False,
                logits_to_keep=1,
                kv_batch=_Again(loaded.facts, cached, best),
            )
    return [best[layer] for layer in range(loaded.facts.num_layers)]


def _going_on(loaded: LoadedModel, states: StateStep | None) -> AbstractContextManager[None]:
    if loaded.recurrent is None:
        return nullcontext()
    assert states is not None, "recurrent layers need the context's state"
    return loaded.recurrent.stepping(states)


def _repetitions(loaded: LoadedModel, context: list[int]) -> Iterator[list[int]]:
    """Yield the instruction and a part of the context, as much as the positions allow."""
    start, most = 0, loaded.facts.max_position
    while start < len(context):
        instruction = _instruction(loaded, context[max(0, start - _CUE_TOKENS) : start])
        size = min(REREAD_TOKENS, most - len(context) - len(instruction))
        if size < 1:
            raise InvalidArgumentError(
                f"a prompt of {len(context)} tokens cannot be repeated by {loaded.facts.name!r}, which has "
                f"{most} positions; shorten it, or use another policy than kvzip."
            )
        yield instruction + context[start : start + size]
        start += size


def _instruction(loaded: LoadedModel, cue: list[int]) -> list[int]:
    """Encode the instruction to repeat a part of the context. cue: the tokens before it, if any."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        return []
    if not cue:
        return list(tokenizer.encode(_WHOLE, add_special_tokens=False))
    words, end = (tokenizer.encode(text, add_special_tokens=False) for text in (_PART, "\n"))
    return [*words, *cue, *end]


class _Reached(Exception):
    pass


class _UpTo:
    """Serves the layers before one; there the forward pass ends."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.found: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer == self.layer:
            self.found = call
            raise _Reached
        softmax = call.softmax
        if any(each is not None for each in (softmax.softcap, softmax.sinks, softmax.window, softmax.chunk)):
            return causal_attention(call.q, call.k, call.v, softmax)
        q, k, v = (x.transpose(0, 1)[None] for x in (call.q, call.k, call.v))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=softmax.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


@torch.inference_mode()
def call_of_layer(loaded: LoadedModel, tokens: list[int], layer: int) -> AttentionCall:
    """A layer's inputs for one text at positions 0, 1, ..., after full attention in the layers before."""
    batch = _UpTo(layer)
    ids = torch.tensor([tokens], device=loaded.facts.device)
    places = torch.arange(len(tokens), device=ids.device)[None]
    with suppress(_Reached):
        loaded.model(input_ids=ids, position_ids=places, use_cache=False, logits_to_keep=1, kv_batch=batch)
    assert batch.found is not None, f"layer {layer} was not reached"
    return batch.found
