"""The tiny Llama without transformers' overhead, and the faults that a test can switch on in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from kvreclaim.model.attention import paged_attention_forward

GUILTY = 62
"""A token that raises wherever it is computed."""
POISON = 63
"""A token whose hidden states are NaN."""
FIRST_SPECIAL = GUILTY
NEVER = -1e4
"""The logit of special tokens, where the model forbids them."""
NUM_POSITIONS = 512
"""Positions that it has angles of; some checks look beyond what an engine serves."""


class Boom(RuntimeError):
    """An injected failure."""


class Faults:
    """Faults of a forward pass, which is given to a model as `forward`. No fault is on at first.

    forbids:    special tokens are never drawn
    raises:     passes that are still to fail when all but the last layer is computed
    not_finite: "all" rows of the next pass, or the place (0 to 1) of the one that is NaN
    noise:      relative; each number of an embedding is off by so much
    fired:      what went wrong in the last pass: "raised", or the rows that were NaN
    """

    def __init__(self) -> None:
        self.forbids = False
        self.random = torch.Generator().manual_seed(0)
        self.clear()

    def clear(self) -> None:
        self.raises = 0
        self.not_finite: str | float | None = None
        self.noise = 0.0
        self.fired: str | range | None = None

    def spoil(self, hidden: Tensor, ids: list[int]) -> Tensor:
        """The embeddings [T, M] of these tokens, as they are to be."""
        if self.noise:
            hidden = hidden * (1 + self.noise * torch.randn(hidden.shape, generator=self.random))
        wrong = [row for row, token in enumerate(ids) if token == POISON]
        if self.not_finite is not None:
            self.fired = range(len(ids))
            if not isinstance(self.not_finite, str):
                place = min(len(ids) - 1, int(self.not_finite * len(ids)))
                self.fired = range(place, place + 1)
            self.not_finite = None
            wrong += self.fired
        hidden[wrong] = float("nan")
        return hidden

    def break_off(self, ids: list[int]) -> None:
        """Before the last layer."""
        if self.raises:
            self.raises -= 1
            self.fired = "raised"
            raise Boom("once")
        if GUILTY in ids:
            raise Boom("guilty")

    def forbid(self, logits: Tensor) -> None:
        if self.forbids:
            special = logits[:, FIRST_SPECIAL:]
            special.masked_fill_(special.isfinite(), NEVER)


class Whole(Faults):
    """A model's own forward pass: one with recurrent layers, each of which writes its state at once."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.forward = model.forward
        self.ids: list[int] = []
        model.get_input_embeddings().register_forward_hook(
            lambda _, args, out: self.spoil(out[0].clone(), self.ids)[None]
        )
        model.model.layers[-1].register_forward_pre_hook(lambda *_: self.break_off(self.ids))

    def __call__(self, input_ids: Tensor, **kwargs: Any) -> Any:
        self.fired, self.ids = None, input_ids[0].tolist()
        found = self.forward(input_ids=input_ids, **kwargs)
        self.forbid(found.logits[0])
        return found


class Lean(Faults):
    """A Llama's forward pass with its weights, a Ministral's or a dense Llama 4's."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.layers = [_Layer(layer, model.config) for layer in model.model.layers]
        self.embeddings = model.get_input_embeddings().weight.detach()
        self.norm = model.model.norm.weight.detach()
        self.head = model.get_output_embeddings().weight.detach().T.contiguous()
        self.eps = model.config.rms_norm_eps
        positions = torch.arange(NUM_POSITIONS)[None]
        turn = model.model.rotary_emb(self.embeddings, positions)
        if isinstance(turn, Tensor):  # Llama 4's, complex, of neighbouring dims
            self.cos, self.sin = (x[0, :, None].repeat_interleave(2, -1) for x in (turn.real, turn.imag))
            self.sin[..., ::2] *= -1
        else:
            self.cos, self.sin = (x[0, :, None] for x in turn)
            self.sin[..., : self.sin.shape[-1] // 2] *= -1  # rotate_half: a roll whose first half is negative

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor | int, kv_batch: Any, **_: Any
    ) -> SimpleNamespace:
        """Compute as transformers' own model: logits [1, rows, V]."""
        self.fired = None
        ids = input_ids[0].tolist()
        hidden = self.spoil(self.embeddings[ids], ids)
        cos, sin = self.cos[position_ids[0]], self.sin[position_ids[0]]
        for layer in self.layers:
            if layer is self.layers[-1]:
                self.break_off(ids)
            hidden = layer(hidden, cos, sin, kv_batch)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = functional.rms_norm(hidden[rows], self.norm.shape, self.norm, self.eps) @ self.head
        self.forbid(logits)
        return SimpleNamespace(logits=logits[None])


class _Layer:
    """One decoder layer: [T, M] -> [T, M]."""

    def __init__(self, layer: Any, config: Any) -> None:
        attention = layer.self_attn
        is_llama4 = hasattr(layer, "feed_forward")
        mlp = layer.feed_forward if is_llama4 else layer.mlp
        self.attention = attention
        self.turns = getattr(attention, "use_rope", True)
        self.partner = _neighbour if is_llama4 else _other_half
        self.heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        self.dim = attention.head_dim
        self.eps = config.rms_norm_eps
        self.norms = layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()
        self.qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.up, self.down = (
            _joined(attention.o_proj),
            _joined(mlp.gate_proj, mlp.up_proj),
            _joined(mlp.down_proj),
        )

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv_batch: Any) -> Tensor:
        normed = self._normed(hidden, 0)
        x = normed @ self.qkv
        q, k, v = x.unflatten(-1, (-1, self.dim)).split(self.heads, 1)
        if self.turns:
            q, k = (x * cos + self.partner(x) * sin for x in (q, k))
        given = (x.transpose(0, 1)[None] for x in (q, k, v))
        attended, _ = paged_attention_forward(
            self.attention,
            *given,
            None,
            scaling=self.attention.scaling,
            kv_batch=kv_batch,
            sliding_window=getattr(self.attention, "sliding_window", None),
            layer_input=normed[None],
        )
        hidden = hidden + attended[0].flatten(1) @ self.out
        gate, up = (self._normed(hidden, 1) @ self.up).chunk(2, -1)
        return hidden + (functional.silu(gate) * up) @ self.down

    def _normed(self, hidden: Tensor, which: int) -> Tensor:
        weight = self.norms[which]
        return functional.rms_norm(hidden, weight.shape, weight, self.eps)


def _other_half(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)


def _neighbour(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _joined(*modules: Any) -> Tensor:
    return torch.cat([module.weight.detach() for module in modules]).T.contiguous()
