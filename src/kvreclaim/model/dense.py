"""Llama, Mistral, Qwen2 and Qwen3 in plain torch, as transformers computes them.

Importing a model of transformers imports torch._dynamo, torch.distributed and scipy, which would be most of a
start. These modules have its names, structure and order of operations, so whatever watches or replaces a
part of transformers' model does the same here. Tests compare their numbers bit for bit.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvreclaim.model.attention import KVBatch, paged_attention_forward

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotations with the same frequencies for texts of every length."""


def is_dense(config: Any) -> bool:
    """Return whether a DenseModel computes what transformers' model of this config does."""
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        and (config.model_type != "mistral" or config.sliding_window is None)
        and (config.rope_parameters or {}).get("rope_type") in ROTATIONS
        and config.num_attention_heads % config.num_key_value_heads == 0
    )


class DenseConfig:
    """All fields of a config of transformers, whose class would be imported with those of all models.

    fields:      as its to_dict returns them, in JSON
    default_eos: eos_token_id of its class
    """

    def __init__(self, fields: dict[str, Any], default_eos: int | None) -> None:
        self._fields, self.default_eos = fields, default_eos
        vars(self).update(copy.deepcopy(fields), dtype=getattr(torch, fields.get("dtype") or "", None))

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._fields)

    def get_text_config(self) -> DenseConfig:
        return self


@dataclass(frozen=True, slots=True, eq=False)
class DenseStates:
    """last_hidden_state: [1, T, M]"""

    last_hidden_state: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DenseLogits:
    """logits: [1, N, V]"""

    logits: Tensor


class _Uninitialised(TorchFunctionMode):
    """Leaves out torch.nn.init, which for a meta tensor imports torch._dynamo."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_init = getattr(func, "__module__", None) == nn.init.__name__
        return None if is_init else func(*args, **(kwargs or {}))


class DenseModel(nn.Module):
    """A causal model. Its parameters are meta tensors until they are filled; the frequencies of its rotation
    are there.

    config: transformers' config, for which is_dense holds
    dtype:  of its parameters
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        rotation = Rotary(config)
        with torch.device("meta"), _Uninitialised():
            self.model = DenseDecoder(config, dtype, rotation)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> nn.Module:
        return self.model

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: Any) -> None:
        self.lm_head = head

    def forward(self, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **kwargs: Any) -> DenseLogits:
        """input_ids: [1, T]; logits_to_keep: so many last places, all for 0, or a tensor of places;
        kwargs: position_ids [1, T] and kv_batch."""
        states = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return DenseLogits(self.lm_head(states[:, kept]))


class DenseDecoder(nn.Module):
    """Embeddings, decoder layers and the last norm."""

    def __init__(self, config: Any, dtype: torch.dtype, rotation: Rotary) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(DenseLayer(config, i, dtype) for i in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.rotary_emb = rotation

    def forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> DenseStates:
        states = self.embed_tokens(input_ids)
        angles = self.rotary_emb(states, position_ids)
        for layer in self.layers:
            states = layer(states, position_ids=position_ids, position_embeddings=angles, **kwargs)
        return DenseStates(self.norm(states))


class DenseLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to its input."""

    def __init__(self, config: Any, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = DenseAttention(config, index, dtype)
        self.mlp = GatedMlp(config, dtype)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        states = hidden_states + attended
        found: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found


class DenseAttention(nn.Module):
    """Queries, keys and values of a layer, rotated and handed to a KVBatch."""

    def __init__(self, config: Any, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer_idx = config, index
        size, kind = config.hidden_size, config.model_type
        self.head_dim = getattr(config, "head_dim", None) or size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        outer = kind != "qwen2" and getattr(config, "attention_bias", False)
        inner = outer or kind == "qwen2"
        queries, keys = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(size, queries, bias=inner, dtype=dtype)
        self.k_proj = nn.Linear(size, keys, bias=inner, dtype=dtype)
        self.v_proj = nn.Linear(size, keys, bias=inner, dtype=dtype)
        self.o_proj = nn.Linear(queries, size, bias=outer, dtype=dtype)
        self.q_norm, self.k_norm = (
            RmsNorm(self.head_dim, config.rms_norm_eps, dtype) if kind == "qwen3" else None for _ in range(2)
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        kv_batch: KVBatch | None = None,
        layer_input: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """others: what transformers passes to every layer, and these do not need"""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (each(hidden_states).view(shape) for each in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        q, k = (rotated(each, *position_embeddings) for each in (q, k))
        out, _ = paged_attention_forward(
            self, q, k, v, None, self.scaling, kv_batch=kv_batch, layer_input=layer_input
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [1, H, T, D]; cos, sin: [1, T, D]"""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, dim=-1)
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


class GatedMlp(nn.Module):
    """SiLU(gate) * up, and down."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(size, inner, bias=bias, dtype=dtype)
        self.up_proj = nn.Linear(size, inner, bias=bias, dtype=dtype)
        self.down_proj = nn.Linear(inner, size, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class RmsNorm(nn.Module):
    """An RMS norm in fp32, rounded before it is scaled."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        states = hidden_states.to(torch.float32)
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * states.to(hidden_states.dtype)


class Rotary(nn.Module):
    """cos and sin [1, T, D] of a config's rotation, in the states' dtype."""

    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            places = torch.arange(0, dim, 2, dtype=torch.float) / dim
            frequencies, self.scale = 1.0 / (config.rope_parameters["rope_theta"] ** places), 1.0
        else:
            frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](config)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self.scale).to(x.dtype), (both.sin() * self.scale).to(x.dtype)
