"""transformers with exactly the tokens dropped that the plugin dropped: per layer and KV head, from then on.

Pass i was made when num_computed_i tokens had been computed, and kept positions_i of them. So the queries at
positions [num_computed_i, num_computed_i+1) see positions_i and whatever came after num_computed_i, up to
themselves; those before the first pass see everything. The model runs once over prompt and output in float32:
what differs from vLLM is vLLM's rounding, and a token that rounding flipped does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

ATTENTION = "kvreclaim_dropped"
BF16 = 0.03
"""Mean difference of log-probabilities that computing in bf16 may make."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens that one pass kept.

    num_computed: tokens computed when it was made, evicted ones included: the position of the next query
    positions:    [L, R, most] integers, the positions kept, -1 behind those of a head that keeps fewer; R KV
                  heads, or KV heads of every rank one after the other, rank 0 first. The query heads of a
                  layer are dealt evenly to the R rows.
    """

    num_computed: int
    positions: Tensor


def full_logprobs(model: Path, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Log-probability of each output token over the full context: [len(output)] float32."""
    return logprobs_with_drops(model, prompt, output, ())


@torch.inference_mode()
def logprobs_with_drops(
    model: Path,
    prompt: Sequence[int],
    output: Sequence[int],
    passes: Sequence[Kept],
    *,
    rounding: Callable[[Tensor], Tensor] | None = None,
    key_rounding: Callable[[int, Tensor], Tensor] | None = None,
    exact_layers: Collection[int] = (),
) -> Tensor:
    """Log-probability of each output token given all tokens before it, less what the passes dropped.

    Args:
        model:    directory of a transformers model
        prompt, output: token ids of one request; the output is taken as given (teacher forcing)
        passes:   of this request, in the order they were made; none is the full context
        rounding: what storing does to keys (after rotation) and values, None for nothing; for a cache in fp8:
                  lambda x: x.to(torch.float8_e4m3fn).float()
        key_rounding: what it does to the keys [1, K, T, D] of a layer instead; None: the same
        exact_layers: layers whose cache does not round

    Returns: [len(output)] float32.
    """
    network = _load(model)
    ids = torch.tensor([[*prompt, *output]])
    for index, layer in enumerate(network.model.layers):
        layer.self_attn.seen = attention_mask(passes, index, network.config.num_attention_heads, ids.shape[1])
        of_layer = None if index in exact_layers else rounding
        layer.self_attn.kv_rounding = of_layer
        layer.self_attn.key_rounding = of_layer if key_rounding is None else partial(key_rounding, index)
    logits = network(ids, use_cache=False).logits[0]
    of_output = logits[len(prompt) - 1 : -1].float().log_softmax(dim=-1)
    return of_output.gather(1, torch.tensor(output)[:, None])[:, 0]


def check_logprobs(
    model: Path, prompt: Sequence[int], output: Sequence[int], logprobs: Tensor, passes: Sequence[Kept]
) -> None:
    """Assert that vLLM's log-probabilities [len(output)] are those with exactly these tokens dropped, and
    that dropping them matters: those of the full context differ by more than 1 on average."""
    dropped = logprobs_with_drops(model, prompt, output, passes)
    effect = float((dropped - full_logprobs(model, prompt, output)).abs().mean())
    error = float((dropped - logprobs).abs().mean())
    assert effect > 1, (
        f"{len(passes)} passes changed log-probabilities by {effect:.3f} only: that proves nothing"
    )
    assert error <= BF16, (
        f"log-probabilities differ by {error:.4f} on average, the full context by {effect:.3f}"
    )


def attention_mask(passes: Sequence[Kept], layer: int, num_heads: int, num_tokens: int) -> Tensor:
    """Which keys the queries of a layer see: [H or 1, T, T] bool, True = seen."""
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    if not passes:
        return causal[None]
    seen = causal.expand(num_heads, -1, -1).clone()
    ends = [*(kept.num_computed for kept in passes[1:]), num_tokens]
    assert ends == sorted(ends), f"passes out of order: {ends}"
    for kept, end in zip(passes, ends, strict=True):
        start, rows = kept.num_computed, kept.positions[layer].long()
        assert int(rows.max()) < start, f"a pass before position {start} kept position {int(rows.max())}"
        there = rows >= 0
        assert bool(((rows.diff(dim=-1) > 0) | ~there[:, 1:]).all()), "a position kept twice, or out of order"
        alive = torch.zeros(len(rows), start + 1, dtype=torch.bool)
        alive = alive.scatter_(1, rows.where(there, start), True)[:, :start]
        alive = alive.repeat_interleave(num_heads // len(rows), dim=0)
        seen[:, start:end, :start] = alive[:, None, :]
    return seen


def passes_of(traces: Sequence[Sequence[tuple[str, int, Tensor]]], request_id: str) -> list[Kept]:
    """The passes of one request out of what `kvreclaim_take_trace` answers.

    Args:
        traces:     one list per worker, rank 0 first: (engine's id, num_computed, positions [L, Kl, keep])
        request_id: as the caller gave it; the engine's begins with it and a hyphen
    """
    own = [
        [(length, positions) for name, length, positions in trace if _is(name, request_id)]
        for trace in traces
    ]
    lengths = [[length for length, _ in trace] for trace in own]
    assert all(each == lengths[0] for each in lengths), (
        f"workers disagree on when passes were made: {lengths}"
    )
    return [
        Kept(entries[0][0], _side_by_side([positions for _, positions in entries]))
        for entries in zip(*own, strict=True)
    ]


def _side_by_side(ranks: Sequence[Tensor]) -> Tensor:
    """[L, R, most] of [L, Kl, most of its own] each."""
    most = max(positions.shape[-1] for positions in ranks)
    return torch.cat(
        [torch.nn.functional.pad(each, (0, most - each.shape[-1]), value=-1) for each in ranks], dim=1
    )


def _is(name: str, request_id: str) -> bool:
    return name == request_id or name.rpartition("-")[0] == request_id


def _load(model: Path) -> Any:
    AttentionInterface.register(ATTENTION, _attend)
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=ATTENTION
    ).eval()


def _attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _: Any,
    scaling: float,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention over a whole sequence, with what logprobs_with_drops laid down in the layer; s_aux: [H]
    sinks."""
    if module.kv_rounding is not None:
        k, v = module.key_rounding(k), module.kv_rounding(v)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    logits = (q @ k.transpose(-1, -2) * scaling).masked_fill(~module.seen, -torch.inf)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux[None, :, None, None].expand(*logits.shape[:-1], 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).contiguous(), None
