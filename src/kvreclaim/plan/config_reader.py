"""The layers of a config of a known family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvreclaim.checks import is_int, require
from kvreclaim.errors import UnsupportedModelError
from kvreclaim.plan.families import (
    ALIASES,
    COMPOSITE,
    DEFAULTS,
    EXPERTS,
    FAMILIES,
    OTHER_NAMES,
    REFUSED,
    TELLING,
    ModelFamily,
    Switch,
)
from kvreclaim.plan.shapes import Experts, LayerShape

_MOST_LAYERS = 1024
_LARGEST = 1 << 40
_OF_MIXERS: Mapping[str, set[str]] = {
    "delta": {"layer_types", "linear_num_key_heads"},
    "conv": {"layer_types", "conv_L_cache"},
    "mamba": {"attn_layer_period", "mamba_d_state"},
    "mamba2": {"layer_types", "mamba_d_state", "ssm_state_size"},
}
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """One config of a known family."""

    config: Mapping[str, Any]
    name: str

    @property
    def kind(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def family(self) -> ModelFamily:
        found = FAMILIES.get(self.kind)
        if self.kind in REFUSED:
            raise UnsupportedModelError(
                f"config.json of {self.name} is of model_type {self.kind!r}, {REFUSED[self.kind]}; such "
                "models are not planned."
            )
        if found is None:
            raise UnsupportedModelError(
                f"config.json of {self.name} is of model_type {self.config.get('model_type')!r}, and its "
                f"layers are not known here; known are {', '.join((*FAMILIES, *COMPOSITE))}."
            )
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """Return the file's value, which may be null, or the default of transformers' class."""
        defaults = DEFAULTS[self.kind]
        others = (ALIASES.get(self.kind, {}), defaults.get(OTHER_NAMES, {}), {key: key})
        names = [str(each[key]) for each in others if key in each]
        for found in (self.config, defaults):
            for name in names:
                if name in found:
                    return found[name]
        return default

    def number(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. Raises: InvalidArgumentError if it is missing or anything else."""
        value: Any = self.get(key)
        value = default if value is None else value
        require(value is not None, f"config.json of {self.name} ({self.kind}) lacks {key}; add it.", "model")
        right = is_int(value) and 0 < value <= _LARGEST
        self._require(right, f"{key} is {_short(value)}; it must be an integer from 1 to {_LARGEST}.")
        return int(value)

    def count(self, key: str) -> int:
        """Return a positive integer; 0 for null or a missing key."""
        return self.number(key) if self.get(key) else 0

    def integer(self, key: str, default: int | None) -> int:
        """Return an integer of any sign; 0 for null or a missing key. Raises: InvalidArgumentError."""
        value: Any = self.get(key, default) or 0
        self._require(is_int(value), f"{key} is {_short(value)}; it must be an integer.")
        return int(value)

    def numbers(self, key: str) -> list[int] | None:
        """Return a list of integers; None without one. Raises: InvalidArgumentError."""
        value = self.get(key)
        right = value is None or (isinstance(value, list) and all(map(is_int, value)))
        self._require(right, f"{key} is {_short(value)}; it must be a list of integers.")
        return value

    def has(self, switch: Switch) -> bool:
        return bool(self.get(switch)) if isinstance(switch, str) else switch

    def _require(self, condition: bool, what: str) -> None:
        require(condition, f"config.json of {self.name}: {what}", "model")

    def _unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"config.json of {self.name}: {what}")

    def layers(self) -> tuple[LayerShape, ...]:
        self._refuse_strange()
        count = self.number("num_hidden_layers")
        self._require_few(count)
        windows = self._windows(count)
        attention = self._latent() if self.family.latent else self._heads()
        return tuple(self._layer(n, windows[n], attention) for n in range(count))

    def max_position(self) -> int:
        """Positions of the model; those of its training if there is no such field (ALiBi)."""
        return self.number("max_position_embeddings", self.family.trained_positions)

    def final_plain(self) -> int:
        """Norms outside the layers, biases of the head, a table of positions."""
        family, hidden = self.family, self.number("hidden_size")
        found = hidden * (family.final + family.table_norms)
        found += self.number("vocab_size") * self.has(family.head_bias)
        if family.positions is not None:
            found += hidden * (self.number("max_position_embeddings") + family.positions)
        return found

    def _require_few(self, count: int) -> None:
        self._require(count <= _MOST_LAYERS, f"{count} layers are too many.")

    def _refuse_strange(self) -> None:
        family = self.family
        read = {*EXPERTS} if family.experts else set()
        read |= {"sliding_window", "layer_types"} if family.windows != "none" else set()
        read |= {"attention_chunk_size"} if family.windows == "chunks" else set()
        read |= {"kv_lora_rank"} if family.latent else set()
        read |= _OF_MIXERS.get(family.mixer, set())
        types = self.config.get("layer_types")
        if isinstance(types, list) and len(types) != (count := self.number("num_hidden_layers")):
            raise self._unsupported(
                f"layer_types has {len(types)} entries for {count} layers; transformers refuses such a model."
            )
        for key in TELLING:
            value = self.config.get(key)
            plain = key == "layer_types" and isinstance(value, list) and all(kind == _FULL for kind in value)
            if value and not plain and key not in read:
                raise UnsupportedModelError(
                    f"config.json of {self.name} has {key} = {_short(value)}, which changes what is "
                    f"cached, and models of type {self.kind} are not known with it; a plan would be wrong."
                )

    def _windows(self, count: int) -> list[int | None]:
        """Maximum number of tokens that the queries of each layer see."""
        how = self.family.windows
        key, narrow = ("attention_chunk_size", _CHUNKED) if how == "chunks" else ("sliding_window", _SLIDING)
        size = self.get(key)
        used = how in ("all", "types", "chunks", "from_layer_always") or (
            how != "none" and bool(self.get("use_sliding_window"))
        )
        if not used or size is None:
            return [None] * count
        types = self.get("layer_types") if how not in ("all", "all_if_used") else None
        if types is None:
            types = self._default_types(count)
        known = isinstance(types, list) and all(kind in (_FULL, narrow) for kind in types)
        if not known or len(types) != count:
            raise self._unsupported(
                f"layer_types is {_short(types)}; for {count} layers it must have as many entries, each "
                f"{_FULL} or {narrow}."
            )
        window = self.number(key)
        return [window if kind == narrow else None for kind in types]

    def _default_types(self, count: int) -> list[str]:
        how, pattern = self.family.windows, self.family.pattern
        if how in ("all", "all_if_used"):
            return [_SLIDING] * count
        if how in ("from_layer", "from_layer_always"):
            first = self.number("max_window_layers")
            return [_SLIDING if n >= first else _FULL for n in range(count)]
        if how in ("types_if_used", "chunks"):
            every = self.number("no_rope_layer_interval")
            rotated = self.numbers("no_rope_layers") or [(n + 1) % every for n in range(count)]
            with_rope, without = (_CHUNKED, _FULL) if how == "chunks" else (_FULL, _SLIDING)
            return [with_rope if each else without for each in rotated]
        if isinstance(pattern, int) and pattern < 0:
            return [_SLIDING if n % -pattern else _FULL for n in range(count)]
        pattern = self.number(*pattern) if isinstance(pattern, tuple) else pattern or count + 1
        return [_SLIDING if (n + 1) % pattern else _FULL for n in range(count)]

    def _heads(self) -> LayerShape:
        """Attention of one layer: cache and weights."""
        family, hidden, heads = self.family, self.number("hidden_size"), self.number("num_attention_heads")
        kv_heads = heads if family.one_kv else self.number("num_key_value_heads", heads)
        kv_heads = 1 if self.has(family.one_kv) else kv_heads
        dim = self.number("head_dim", hidden // heads)
        self._require(heads % kv_heads == 0, f"{heads} heads do not share {kv_heads} KV heads evenly.")
        queries, keys = heads * dim, kv_heads * dim
        gated = queries * (1 + family.gated)
        linear = hidden * (gated + 2 * keys) + queries * hidden
        biased = gated if family.gate_bias else queries
        plain = (biased + 2 * keys) * self.has(family.qkv_bias) + hidden * self.has(family.o_bias)
        norms = {"": 0, "head": 2 * dim, "full": queries + keys, "head_bias": 4 * dim}
        plain += norms[family.qk_norm] * self.has(family.qk_norm_if)
        plain += heads * family.sinks + dim * family.head_vectors
        return LayerShape(heads, kv_heads, dim, dim, dim, linear, plain, sinks=family.sinks, attention=linear)

    def _latent(self) -> LayerShape:
        """MLA: one latent and one rotary key for all heads."""
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        rank, rotary = self.number("kv_lora_rank"), self.number("qk_rope_head_dim")
        nope, value = self.number("qk_nope_head_dim"), self.number("v_head_dim", hidden // heads)
        bias = self.has(self.family.o_bias)
        queries = heads * (nope + rotary)
        if self.get("q_lora_rank") is None:
            linear, plain = hidden * queries, 0
        else:
            q_rank = self.number("q_lora_rank")
            linear, plain = (hidden + queries) * q_rank, q_rank + q_rank * bias
        linear += hidden * (rank + rotary) + rank * heads * (nope + value) + heads * value * hidden
        plain += rank + (rank + rotary + hidden) * bias
        expanded = heads * (nope + rotary + value)
        made = LayerShape(heads, 1, rank + rotary, rank, rotary, linear, plain, attention=linear)
        return replace(made, latent=True, expanded=expanded)

    def _layer(self, number: int, window: int | None, attention: LayerShape) -> LayerShape:
        family, hidden = self.family, self.number("hidden_size")
        linear, plain = attention.linear, attention.plain + family.norms * hidden
        experts = self._experts() if self._has_experts(number) else None
        if experts is None:
            size = self._dense_size() if family.dense else 0
            linear += (3 - family.ungated) * hidden * size
            plain += ((2 - family.ungated) * size + hidden) * self.has(family.mlp_bias)
            plain += family.scalars + size * family.inner_norm
        else:
            plain += experts.count * (hidden + family.router_bias)
            if shared := self.count(family.shared) if isinstance(family.shared, str) else family.shared:
                size = shared * self.number("moe_intermediate_size", self.get("intermediate_size"))
                linear += 3 * hidden * size
                plain += (2 * size + hidden) * self.has(family.mlp_bias)
        if family.beside and (experts is not None or not family.dense):
            linear += 3 * hidden * self.count(family.beside)
            plain += hidden * family.beside_gate
        chunked = window is not None and family.windows == "chunks"
        return replace(attention, linear=linear, plain=plain, window=window, chunked=chunked, experts=experts)

    def _dense_size(self) -> int:
        widening = self.number("expansion_ratio", 4)
        return self.number(self.family.dense, widening * self.number("hidden_size"))

    def _has_experts(self, number: int) -> bool:
        if not self.family.experts:
            return False
        if (chosen := self.numbers("moe_layers")) is not None:
            return number in chosen
        step = self.number("decoder_sparse_step", self.number("interleave_moe_layer_step", 1))
        kinds = self.get("mlp_layer_types")
        if isinstance(kinds, list) and number < len(kinds):
            return bool(kinds[number] != "dense")
        first = self.integer("first_k_dense_replace", self.family.first_dense)
        if number < first or number > self.integer("moe_layer_end_index", number) % _MOST_LAYERS:
            return False
        return number not in (self.numbers("mlp_only_layers") or ()) and (number + 1) % step == 0

    def _experts(self) -> Experts:
        hidden = self.number("hidden_size")
        size = self.number("moe_intermediate_size", self.get("intermediate_size"))
        written = next((key for key in EXPERTS if self.config.get(key)), None)
        return Experts(
            count=self.number(written or next(filter(self.get, EXPERTS), EXPERTS[0])),
            per_token=self.number("num_experts_per_tok"),
            linear=3 * hidden * size,
            plain=(2 * size + hidden) * self.family.expert_bias,
        )


def _short(value: Any) -> str:
    """Shorten a value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
