"""Tokens that our own engine's compressors keep of a request, pass by pass: from transformers' queries, keys,
values and hidden states in fp32, with the tokens dropped that vLLM has dropped before.

>>> text = watched(directory, prompt, answer.tokens, passes)
>>> check_choices(text, compressor, 32, passes)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import Kept, _attend, _load, attention_mask
from torch import Tensor
from transformers import AttentionInterface

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.kvzap import token_scores
from kvreclaim.compression.policy import LayerSignals, Signal
from kvreclaim.compression.uneven import choose_uneven
from kvreclaim.ops.key_source import DenseSource

SEEN = "kvreclaim_seen"


@dataclass(slots=True)
class Layer:
    """Signals of a whole text: queries [H, T, D] and keys [K, T, D], rotated, values [K, T, D]; hidden:
    [T, M], the layer's input."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    hidden: Tensor


@torch.inference_mode()
def watched(model: Path, tokens: Sequence[int], passes: Sequence[Kept]) -> list[Layer]:
    """Every layer's inputs for these tokens, each of which sees what these passes have left."""
    found: dict[int, list[Tensor]] = {}

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        found[module.layer_idx] += [q[0], k[0], v[0]]
        return _attend(module, q, k, v, *args, **kwargs)

    def given(module: Any, args: Any, kwargs: Any) -> None:
        found[module.layer_idx] = [kwargs["hidden_states"][0]]

    network = _load(model)
    AttentionInterface.register(SEEN, attend)
    network.set_attn_implementation(SEEN)
    for index, layer in enumerate(network.model.layers):
        layer.self_attn.seen = attention_mask(passes, index, network.config.num_attention_heads, len(tokens))
        layer.self_attn.kv_rounding = None
        layer.self_attn.register_forward_pre_hook(given, with_kwargs=True)
    network(torch.tensor([list(tokens)]), use_cache=False)
    return [Layer(*found[n][1:], found[n][0]) for n in range(len(found))]


def check_choices(
    text: list[Layer], compressor: Compressor, block_size: int, passes: Sequence[Kept], least: float = 1.0
) -> None:
    """Assert that each pass has kept what the compressor chooses of the same tokens. least: share of each
    head's tokens that must agree."""
    alive: list[list[Tensor]] = [[torch.empty(0, dtype=torch.int64)] * len(text[0].keys) for _ in text]
    computed = 0
    for number, kept in enumerate(passes):
        new = torch.arange(computed, kept.num_computed)
        alive = [[torch.cat([own, new]) for own in rows] for rows in alive]
        computed = kept.num_computed
        inputs = _PassInputs(text, compressor, alive, computed, number == 0)
        uneven = compressor.eviction_method.uneven
        chosen = inputs.unequal(block_size) if uneven else inputs.equal(kept.positions.shape[-1])
        for n, rows in enumerate(chosen):
            for h, wanted in enumerate(rows):
                row = kept.positions[n, h].long()
                found = row[row >= 0]
                assert len(found) == len(wanted), f"pass {number}, layer {n}, head {h}"
                share = torch.isin(wanted, found).float().mean()
                assert share >= least, f"pass {number}, layer {n}, head {h}: {float(share):.3f} as chosen"
                alive[n][h] = found


class _PassInputs:
    """Inputs of a compressor in one pass. alive: positions of each layer and head."""

    def __init__(
        self, text: list[Layer], compressor: Compressor, alive: list[list[Tensor]], end: int, first: bool
    ) -> None:
        self.text, self.compressor, self.alive, self.end, self.first = text, compressor, alive, end, first
        self.needs = compressor.policy.needs

    def equal(self, keep: int) -> list[list[Tensor]]:
        num_tokens, known = len(self.alive[0][0]), None
        if Signal.POSITIONS in self.needs:
            known = torch.stack([torch.stack(rows) for rows in self.alive]).int()
        kept = self.compressor.choose(
            lambda n: self._source(n, self.alive[n]),
            num_tokens,
            0,
            self.end,
            positions=known,
            signals=lambda n: self._signals(n, self.alive[n], self.end),
            first=self.first,
            keep=keep,
        ).expand(len(self.text), len(self.alive[0]), -1)
        return [[own[kept[n, h]] for h, own in enumerate(rows)] for n, rows in enumerate(self.alive)]

    def unequal(self, block_size: int) -> list[list[Tensor]]:
        """Only full blocks are shared out, and queries are those before the open one."""
        tail = self.end % block_size
        alive = [[own[: len(own) - tail] for own in rows] for rows in self.alive]
        counts = np.array([[len(own) for own in rows] for rows in alive])
        end = self.end - tail if Signal.RECENT_QUERIES in self.needs else self.end
        question = HeadsQuestion(
            lambda n, h: self._source(n, alive[n] if h is None else [alive[n][h]], h),
            lambda n: self._signals(n, alive[n] if self.first else None, end),
            counts,
            np.zeros_like(counts),
            end,
            self.first,
            lambda n, h: self._own(n, h, alive[n][h]),
        )
        [choice] = choose_uneven(self.compressor, [question], block_size)
        return [
            [
                torch.cat([alive[n][h][slots], self.alive[n][h][len(alive[n][h]) :]])
                for h, slots in enumerate(rows)
            ]
            for n, rows in enumerate(choice.kept)
        ]

    def _source(self, n: int, rows: list[Tensor], head: int | None = None) -> DenseSource:
        first, parts = head or 0, (self.text[n].keys, self.text[n].values)
        return DenseSource(*(torch.stack([x[first + h, own] for h, own in enumerate(rows)]) for x in parts))

    def _signals(self, n: int, rows: list[Tensor] | None, end: int) -> LayerSignals:
        found = LayerSignals()
        if Signal.RECENT_QUERIES in self.needs:
            window = self.compressor.policy.query_window
            found = replace(found, queries=self.text[n].queries[:, max(0, end - window) : end])
        if Signal.TOKEN_SCORES in self.needs and rows is not None:
            scores = self._scores(n)
            found = replace(found, token_scores=torch.stack([scores[h, own] for h, own in enumerate(rows)]))
        return found

    def _own(self, n: int, h: int, own: Tensor) -> dict[str, Tensor]:
        return {"token_scores": self._scores(n)[h, own][None]} if Signal.TOKEN_SCORES in self.needs else {}

    def _scores(self, n: int) -> Tensor:
        """[K, T], as they are stored."""
        stats = self.compressor.stats_of(n)
        assert stats is not None
        return token_scores(self.text[n].hidden, stats).T.half().float()
