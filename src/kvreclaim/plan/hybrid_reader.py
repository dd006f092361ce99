"""The layers of a config of a family with recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.plan.config_reader import ConfigReader
from kvreclaim.plan.shapes import Experts, LayerShape

ATTENTION, RECURRENT, BOTH, MLP, MOE = "attention", "recurrent", "both", "mlp", "moe"
_NAMES = {
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "conv": RECURRENT,
}
_BLOCKS = {**_NAMES, "mlp": MLP, "moe": MOE}
_PATTERN = {"M": RECURRENT, "*": ATTENTION, "-": MLP, "E": MOE}


@dataclass(frozen=True, slots=True)
class HybridReader(ConfigReader):
    """One config of a family with recurrent layers."""

    def layers(self) -> tuple[LayerShape, ...]:
        self._refuse_strange()
        kinds = self._kinds()
        self._require_few(len(kinds))
        if not {ATTENTION, BOTH} & {*kinds}:
            raise UnsupportedModelError(
                f"config.json of {self.name} ({self.kind}) describes no layer that attends, so there are no "
                "keys and values to plan for."
            )
        heads = self._heads()
        mixer = self._mixer() if {RECURRENT, BOTH} & {*kinds} else _NOTHING
        parts = {ATTENTION: heads, RECURRENT: mixer, BOTH: _joined(heads, mixer)}
        if self.kind == "nemotron_h":
            return tuple(self._block(parts.get(kind, _NOTHING), kind) for kind in kinds)
        return tuple(self._layer(n, None, parts[kind]) for n, kind in enumerate(kinds))

    def _kinds(self) -> list[str]:
        if self.kind == "nemotron_h":
            pattern = self.get("hybrid_override_pattern")
            if self.get("layer_types") is None and pattern is not None:
                known = isinstance(pattern, str) and {*pattern} <= {*_PATTERN}
                self._require_kinds(known, "hybrid_override_pattern", pattern, _PATTERN)
                return [_PATTERN[letter] for letter in pattern]
            return self._types(_BLOCKS, ["linear_attention", "moe", "full_attention", "mlp"], None)
        count = self.number("num_hidden_layers")
        if self.kind == "falcon_h1":
            return [BOTH] * count
        if self.kind == "jamba":
            return [ATTENTION if self._in_turn(n, "attn_layer") else RECURRENT for n in range(count)]
        if self.kind == "bamba":
            return _at(self.numbers("attn_layer_indices") or [], count)
        if self.kind == "lfm2":
            places = self.numbers("full_attn_idxs")
            return self._types(_NAMES, _at(range(count) if places is None else places, count), count)
        if self.family.mixer == "delta":
            every = self.number("full_attention_interval", 4)
            return self._types(
                _NAMES, [RECURRENT if (n + 1) % every else ATTENTION for n in range(count)], count
            )
        return self._types(_NAMES, [RECURRENT] * count, count)

    def _in_turn(self, number: int, what: str) -> bool:
        period = self.number(f"{what}_period")
        offset = self.count(f"{what}_offset")
        self._require(
            offset < period, f"{what}_offset is {offset}; it must be below {what}_period, {period}."
        )
        return number % period == offset

    def _types(self, names: dict[str, str], default: list[str], count: int | None) -> list[str]:
        types = self.get("layer_types")
        if types is None:
            return [names.get(kind, kind) for kind in default]
        known = isinstance(types, list) and all(isinstance(kind, str) and kind in names for kind in types)
        self._require_kinds(known and count in (None, len(types)), "layer_types", types, names)
        return [names[kind] for kind in types]

    def _require_kinds(self, right: bool, key: str, value: Any, names: dict[str, str]) -> None:
        if not right:
            raise self._unsupported(
                f"{key} is {repr(value)[:60]}; it must have an entry for each layer, one of "
                f"{', '.join(names)}."
            )

    def _mixer(self) -> LayerShape:
        mixers = {"delta": self._delta, "conv": self._conv, "mamba": self._mamba, "mamba2": self._mamba2}
        return mixers[self.family.mixer]()

    def _delta(self) -> LayerShape:
        """The gated delta rule."""
        hidden, kernel = self.number("hidden_size"), self.number("linear_conv_kernel_dim")
        key_dim, value_dim = self.number("linear_key_head_dim"), self.number("linear_value_head_dim")
        heads = self.number("linear_num_value_heads")
        keys, values = self.number("linear_num_key_heads") * key_dim, heads * value_dim
        conv = 2 * keys + values
        linear = hidden * (conv + values + 2 * heads) + values * hidden
        plain = conv * kernel + 2 * heads + value_dim
        return _recurrent(linear, plain, conv * kernel, heads * key_dim * value_dim)

    def _conv(self) -> LayerShape:
        """A short convolution."""
        hidden, kernel = self.number("hidden_size"), self.number("conv_L_cache")
        plain = hidden * kernel + 5 * hidden * self.has("conv_bias")
        return _recurrent(4 * hidden * hidden, plain, hidden * kernel, 0)

    def _mamba(self) -> LayerShape:
        """Jamba's Mamba-1, with norms."""
        hidden, kernel, state = (self.number(key) for key in ("hidden_size", "mamba_d_conv", "mamba_d_state"))
        inner = self.number("mamba_expand") * hidden
        given = self.get("mamba_dt_rank")
        rank = -(-hidden // 16) if given in (None, "auto") else self.number("mamba_dt_rank")
        linear = hidden * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * hidden
        plain = inner * (kernel + self.has("mamba_conv_bias")) + inner * (state + 2) + rank + 2 * state
        plain += (2 * inner + hidden) * self.has("mamba_proj_bias")
        return _recurrent(linear, plain, inner * kernel, inner * state)

    def _mamba2(self) -> LayerShape:
        hidden, has_norm = self.number("hidden_size"), True
        if self.kind == "nemotron_h":
            heads, groups = self.number("mamba_num_heads"), self.number("n_groups")
            inner, kernel = heads * self.number("mamba_head_dim"), self.number("conv_kernel")
            state, conv_bias = self.number("ssm_state_size"), self.has("use_conv_bias")
            in_bias = out_bias = self.has("use_bias")
        else:
            heads, groups = self.number("mamba_n_heads"), self.number("mamba_n_groups")
            inner, kernel = self._inner(heads), self.number("mamba_d_conv")
            state, conv_bias = self.number("mamba_d_state"), self.has("mamba_conv_bias")
            in_bias = out_bias = self.has("mamba_proj_bias")
            if self.kind == "falcon_h1":
                out_bias, has_norm = self.has("projectors_bias"), self.has("mamba_rms_norm")
        conv = inner + 2 * groups * state
        into = inner + conv + heads
        plain = (
            conv * (kernel + conv_bias) + 3 * heads + inner * has_norm + into * in_bias + hidden * out_bias
        )
        return _recurrent(hidden * (into + inner), plain, conv * kernel, inner * state)

    def _inner(self, heads: int) -> int:
        inner = self.number("mamba_d_ssm") if self.get("mamba_d_ssm") is not None else None
        inner = inner or self.number("mamba_expand") * self.number("hidden_size")
        given = self.get("mamba_d_head")
        dim = inner // heads if given in (None, "auto") else self.number("mamba_d_head")
        self._require(
            dim * heads == inner, f"{heads} heads of {dim} do not make {inner} channels of its mamba layers."
        )
        return inner

    def _dense_size(self) -> int:
        size = self.number(self.family.dense)
        if self.kind == "lfm2" and self.has("block_auto_adjust_ff_dim"):
            size = int(2 * size / 3)
            factor = self.get("block_ffn_dim_multiplier", 1.0)
            if factor is not None:
                multiple = self.number("block_multiple_of")
                size = -(-int(factor * size) // multiple) * multiple
        return size

    def _has_experts(self, number: int) -> bool:
        if self.kind == "jamba":
            return self.number("num_experts") > 1 and self._in_turn(number, "expert_layer")
        key = "num_local_experts" if self.kind == "granitemoehybrid" else "num_experts"
        return self.count(key) > 0 and super(HybridReader, self)._has_experts(number)

    def _block(self, mixer: LayerShape, kind: str) -> LayerShape:
        """A layer of Nemotron-H: a norm with a mixer, an MLP without a gate, or experts."""
        hidden, bias = self.number("hidden_size"), self.has(self.family.mlp_bias)
        linear, plain, experts = mixer.linear, mixer.plain + hidden, None
        if kind == MLP:
            size = self.number("intermediate_size")
            linear, plain = linear + 2 * hidden * size, plain + (size + hidden) * bias
        elif kind == MOE:
            size, latent = self.number("moe_shared_expert_intermediate_size"), self.count("moe_latent_size")
            count, each = self.number("n_routed_experts"), self.number("moe_intermediate_size")
            experts = Experts(count, self.number("num_experts_per_tok"), 2 * each * (latent or hidden))
            linear += 2 * hidden * (size + latent)
            plain += count * hidden + (size + hidden + (latent + hidden) * (latent > 0)) * bias
        return replace(mixer, linear=linear, plain=plain, experts=experts)


_NOTHING = LayerShape(0, 0, 0, 0, 0, 0, 0)


def _recurrent(linear: int, plain: int, conv: int, summed: int) -> LayerShape:
    return LayerShape(0, 0, 0, 0, 0, linear, plain, conv=conv, summed=summed)


def _joined(heads: LayerShape, mixer: LayerShape) -> LayerShape:
    """A layer with attention and a mixer."""
    return replace(
        heads,
        linear=heads.linear + mixer.linear,
        plain=heads.plain + mixer.plain,
        conv=mixer.conv,
        summed=mixer.summed,
    )


def _at(places: Any, count: int) -> list[str]:
    """Attention at these places."""
    return [ATTENTION if n in places else RECURRENT for n in range(count)]
