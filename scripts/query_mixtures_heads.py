"""Head by head: how concentrated its queries are, and how much of the attention to come a score keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from query_mixtures_grid import Calibration
from query_mixtures_run import Bench
from torch import Tensor

from kvreclaim.compression.policy import LayerView
from kvreclaim.compression.registry import make_policy
from kvreclaim.eval.example import Example
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.ops.reference import causal_attention

DOCUMENTS = 8
FRACTION = 0.1
FAR = 0.1  # an attention probability that counts as a look
SCORES = (
    ("1 centre", "query_mixture", Calibration(1)),
    ("16 centres", "query_mixture", Calibration(16)),
    ("triattention", "triattention", Calibration(16)),
    ("key norm", "knorm(keep=large)", Calibration(16)),
)


@dataclass(frozen=True, slots=True, eq=False)
class _Watch:
    """A KVBatch over one whole document that keeps what each layer computes with."""

    calls: list[AttentionCall] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return causal_attention(call.q, call.k, call.v, call.softmax)


def head_table(bench: Bench) -> str:
    """Markdown: concentration R of each KV head (mean over its query heads and bands), beside the share of
    the looks to come (attention above FAR, paid by a later query to a token that may go) that each score
    keeps in FRACTION of the document. Nothing was evicted before; the cut is where the first half of the
    trace ends."""
    facts = bench.llm.loaded.facts
    layouts = [layer.rope for layer in facts.layers]
    heads = facts.layers[0].num_kv_heads
    ratio = bench.stats(Calibration(16)).concentration(layouts).mean(-1).unflatten(1, (heads, -1)).mean(-1)
    examples = bench.examples[:DOCUMENTS]
    found = torch.stack([_looks(bench, example) for example in examples]).sum(dim=0)
    names = [label for label, _, _ in SCORES]
    lines = [f"| layer, KV head | R | looks | {' | '.join(names)} |", "|" + "---|" * (3 + len(names))]
    for layer in range(facts.num_layers):
        for head in range(heads):
            total, *kept = found[layer, head].tolist()
            shares = " | ".join(f"{share / total:.3f}" if total else "-" for share in kept)
            lines.append(f"| {layer}, {head} | {ratio[layer, head]:.2f} | {total:.0f} | {shares} |")
    return "\n".join(lines)


@torch.inference_mode()
def _looks(bench: Bench, example: Example) -> Tensor:
    """[L, K, 1 + scores]: looks at evictable tokens, and those at what each score keeps."""
    watch, device = _Watch(), bench.llm.loaded.facts.device
    tokens = torch.tensor([list(example.document)], device=device)
    positions = torch.arange(tokens.shape[1], device=device)[None]
    bench.llm.loaded.model(
        input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1, kv_batch=watch
    )
    cut = len(example.prompt) + len(example.trace) // 2
    return torch.stack([_layer_looks(bench, call, cut) for call in watch.calls])


def _layer_looks(bench: Bench, call: AttentionCall, cut: int) -> Tensor:
    recent, sinks = bench.setting.recent, 4
    free = slice(sinks, cut - recent)
    keys, values = call.k[:cut].transpose(0, 1), call.v[:cut].transpose(0, 1)
    looks = _looked_at(call, cut)[:, free]
    places = bench.budget(FRACTION) - recent - sinks
    counts: list[Tensor] = [looks.sum(dim=-1)]
    for _, policy, how in SCORES:
        stats = bench.stats(how).layer(call.layer)
        facts = bench.llm.loaded.facts.layers[call.layer]
        view = LayerView(call.layer, DenseSource(keys, values), cut, facts, stats, free)
        best = make_policy(policy).score(view)[:, free].topk(places, dim=-1).indices
        counts.append(looks.gather(-1, best).sum(dim=-1))
    return torch.stack(counts, dim=-1).float()


def _looked_at(call: AttentionCall, cut: int) -> Tensor:
    """[K, T]: how many later queries of the KV head's query heads look at each of the first cut tokens."""
    heads, kv_heads, length = call.q.shape[1], call.k.shape[1], call.k.shape[0]
    keys = call.k.transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0)
    logits = call.q[cut:].transpose(0, 1) @ keys.mT * call.softmax.scale
    later = torch.arange(length)[None] > torch.arange(cut, length)[:, None]
    attention = logits.masked_fill(later.to(logits.device), -torch.inf).softmax(dim=-1)
    looks = (attention[..., :cut] > FAR).sum(dim=1)
    return looks.unflatten(0, (kv_heads, -1)).sum(dim=1)
