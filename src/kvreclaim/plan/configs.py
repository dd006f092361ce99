"""From a transformers config.json to a ModelShape, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvreclaim.checks import is_int, require
from kvreclaim.config import KV_CACHE_DTYPE_ALIASES
from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.plan.families import COMPOSITE, EXPERTS, FAMILIES, TELLING, Family, Switch
from kvreclaim.plan.shapes import Experts, LayerShape, ModelShape
from kvreclaim.plan.weights import quantization_of

BUNDLED = Path(__file__).parent / "data" / "models"
ABOUT = "kvreclaim"
"""Key of a bundled file under which names, source and date stand."""
_MOST_LAYERS = 1024
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def bundled_models() -> dict[str, Path]:
    """Files of configs that come with the package, by each of their names, the hub's id first."""
    names: dict[str, Path] = {}
    for path in sorted(BUNDLED.glob("*.json")):
        about = json.loads(path.read_text(encoding="utf-8"))[ABOUT]
        names.update(dict.fromkeys(about["names"], path))
    return names


def load_shape(model: str | Path) -> ModelShape:
    """Of a bundled name (whatever its case), a directory with a config.json, or such a file.

    Raises: InvalidArgumentError if there is none, UnsupportedModelError if its layers are not known here.
    """
    path = _find(str(model))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"--model: {str(path)!r} cannot be read as JSON ({error}); name a transformers config.json.",
            field="model",
        ) from error
    require(
        isinstance(config, dict), f"--model: {str(path)!r} holds no JSON object; name a config.json.", "model"
    )
    about = config.pop(ABOUT, None)
    name = about["names"][0] if about else path.parent.name if path.name == "config.json" else path.stem
    return shape_of(config, name)


def _find(model: str) -> Path:
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    known = bundled_models()
    by_case = {name.lower(): file for name, file in known.items()}
    if found := by_case.get(model.lower()):
        return found
    listed = ", ".join(dict.fromkeys(_first_names()))
    raise InvalidArgumentError(
        f"--model {model!r} is no directory with a config.json, no such file, and none of the configs that "
        f"come with kvreclaim: {listed}.",
        field="model",
    )


def _first_names() -> list[str]:
    seen: dict[Path, str] = {}
    for name, path in bundled_models().items():
        seen.setdefault(path, name)
    return list(seen.values())


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Of a parsed config.json. name: as answers call the model. Raises: UnsupportedModelError,
    InvalidArgumentError."""
    outer, notes = config, []
    if (kind := str(config.get("model_type"))) in COMPOSITE:
        key, inner = COMPOSITE[kind]
        require(isinstance(config.get(key), dict), f"config.json of {name} ({kind}) has no {key}.", "model")
        config = {"model_type": inner, **config[key]}
        notes.append("the vision tower is not counted")
    reader = _Reader(config, name)
    if config.get("num_nextn_predict_layers"):
        notes.append("the layers that predict further tokens are not counted")
    layers = reader.layers()
    dtype = _dtype(
        next((v for c in (config, outer) for k in ("dtype", "torch_dtype") if (v := c.get(k))), None)
    )
    if dtype is None:
        dtype = "bf16"
        notes.append("the config says no dtype; bfloat16 is assumed")
    return ModelShape(
        name=name,
        model_type=reader.kind,
        dtype=dtype,
        hidden_size=reader.number("hidden_size"),
        vocab_size=reader.number("vocab_size"),
        max_position=reader.number("max_position_embeddings"),
        tied=bool(reader.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
        layers=layers,
        final_plain=reader.number("hidden_size"),
        quantization=quantization_of(outer.get("quantization_config")),
        notes=tuple(notes),
    )


def _dtype(said: object) -> str | None:
    text = str(said).removeprefix("torch.") if said else None
    return KV_CACHE_DTYPE_ALIASES.get(text, text) if text else None


@dataclass(frozen=True, slots=True)
class _Reader:
    """One config of a known family."""

    config: Mapping[str, Any]
    name: str

    @property
    def kind(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def family(self) -> Family:
        found = FAMILIES.get(self.kind)
        if found is None:
            raise UnsupportedModelError(
                f"config.json of {self.name} is of model_type {self.config.get('model_type')!r}, whose "
                f"layers are not known here; known are {', '.join((*FAMILIES, *COMPOSITE))}."
            )
        return found

    def get(self, key: str, default: Any = None) -> Any:
        return self.config.get(key, self.family.defaults.get(key, default))

    def number(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises: InvalidArgumentError if it is missing or another thing."""
        value: Any = self.get(key)
        value = default if value is None else value
        require(value is not None, f"config.json of {self.name} ({self.kind}) lacks {key}; add it.", "model")
        require(
            is_int(value) and value > 0,
            f"config.json of {self.name}: {key} is {value!r}; it must be an integer >= 1.",
            "model",
        )
        return int(value)

    def says(self, switch: Switch) -> bool:
        return bool(self.get(switch)) if isinstance(switch, str) else switch

    def layers(self) -> tuple[LayerShape, ...]:
        count = self.number("num_hidden_layers")
        require(count <= _MOST_LAYERS, f"config.json of {self.name}: {count} layers are too many.", "model")
        self._refuse_strange()
        windows = self._windows(count)
        attention = self._latent() if self.family.latent else self._heads()
        return tuple(self._layer(n, windows[n], attention) for n in range(count))

    def _refuse_strange(self) -> None:
        family = self.family
        read = {*EXPERTS} if family.experts else set()
        read |= {"sliding_window", "layer_types"} if family.windows != "none" else set()
        read |= {"attention_chunk_size"} if family.windows == "chunks" else set()
        read |= {"kv_lora_rank"} if family.latent else set()
        for key in TELLING:
            value = self.config.get(key)
            plain = key == "layer_types" and value and set(value) == {_FULL}
            if value and not plain and key not in read:
                raise UnsupportedModelError(
                    f"config.json of {self.name} has {key} = {str(value)[:60]}, which changes what is "
                    f"cached, and models of type {self.kind} are not known with it; a plan would be wrong."
                )

    def _windows(self, count: int) -> list[int | None]:
        """Tokens that a layer's queries see at most."""
        how = self.family.windows
        key, narrow = ("attention_chunk_size", _CHUNKED) if how == "chunks" else ("sliding_window", _SLIDING)
        size = self.get(key)
        used = how in ("all", "types", "chunks") or (how != "none" and bool(self.get("use_sliding_window")))
        if not used or size is None:
            return [None] * count
        types = self.get("layer_types") if how not in ("all", "all_if_used") else None
        if types is None:
            types = self._default_types(count)
        strange = sorted({*map(str, types)} - {_FULL, narrow})
        if strange or len(types) != count:
            raise UnsupportedModelError(
                f"config.json of {self.name}: layer_types has {len(types)} entries for {count} layers, of "
                f"the types {', '.join(sorted({*map(str, types)}))}; known are {_FULL} and {narrow}."
            )
        window = self.number(key)
        return [window if kind == narrow else None for kind in types]

    def _default_types(self, count: int) -> list[str]:
        how, pattern = self.family.windows, self.family.pattern
        if how in ("all", "all_if_used"):
            return [_SLIDING] * count
        if how == "from_layer":
            first = self.number("max_window_layers", 28)
            return [_SLIDING if n >= first else _FULL for n in range(count)]
        if how in ("types_if_used", "chunks"):
            every = self.number("no_rope_layer_interval", 4)
            rotated = self.get("no_rope_layers") or [(n + 1) % every for n in range(count)]
            turned, still = (_CHUNKED, _FULL) if how == "chunks" else (_FULL, _SLIDING)
            return [turned if each else still for each in rotated]
        pattern = self.number("sliding_window_pattern", pattern or count + 1)
        return [_SLIDING if (n + 1) % pattern else _FULL for n in range(count)]

    def _heads(self) -> LayerShape:
        """Attention of every layer: its cache, and its weights."""
        family, hidden, heads = self.family, self.number("hidden_size"), self.number("num_attention_heads")
        kv_heads = self.number("num_key_value_heads", heads)
        dim = self.number("head_dim", hidden // heads)
        require(
            heads % kv_heads == 0,
            f"config.json of {self.name}: {heads} heads do not share {kv_heads} KV heads evenly.",
            "model",
        )
        queries, keys = heads * dim, kv_heads * dim
        linear = hidden * (queries + 2 * keys) + queries * hidden
        plain = (queries + 2 * keys) * self.says(family.qkv_bias) + hidden * self.says(family.o_bias)
        plain += {"": 0, "head": 2 * dim, "full": queries + keys}[family.qk_norm]
        plain += heads * family.sinks
        return LayerShape(heads, kv_heads, dim, dim, dim, linear, plain, sinks=family.sinks)

    def _latent(self) -> LayerShape:
        """MLA: one latent and one rotary key for all heads."""
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        rank, rotary = self.number("kv_lora_rank"), self.number("qk_rope_head_dim")
        nope, value = self.number("qk_nope_head_dim"), self.number("v_head_dim")
        bias = self.says(self.family.o_bias)
        queries = heads * (nope + rotary)
        if self.get("q_lora_rank") is None:
            linear, plain = hidden * queries, 0
        else:
            q_rank = self.number("q_lora_rank")
            linear, plain = (hidden + queries) * q_rank, q_rank + q_rank * bias
        linear += hidden * (rank + rotary) + rank * heads * (nope + value) + heads * value * hidden
        plain += rank + (rank + rotary + hidden) * bias
        expanded = heads * (nope + rotary + value)
        return LayerShape(
            heads, 1, rank + rotary, rank, rotary, linear, plain, latent=True, expanded=expanded
        )

    def _layer(self, number: int, window: int | None, attention: LayerShape) -> LayerShape:
        family, hidden = self.family, self.number("hidden_size")
        linear, plain = attention.linear, attention.plain + family.norms * hidden
        experts = self._experts() if self._has_experts(number) else None
        if experts is None:
            size = self.number(family.dense)
            linear += 3 * hidden * size
            plain += (2 * size + hidden) * self.says(family.mlp_bias)
        else:
            plain += experts.count * (hidden + family.router_bias)
            if shared := self.get("n_shared_experts"):
                size = shared * self.number("moe_intermediate_size", self.get("intermediate_size"))
                linear += 3 * hidden * size
                plain += (2 * size + hidden) * self.says(family.mlp_bias)
        chunked = window is not None and family.windows == "chunks"
        return replace(attention, linear=linear, plain=plain, window=window, chunked=chunked, experts=experts)

    def _has_experts(self, number: int) -> bool:
        if not self.family.experts:
            return False
        if (chosen := self.get("moe_layers")) is not None:
            return number in chosen
        step = self.number("decoder_sparse_step", self.get("interleave_moe_layer_step", 1))
        dense = number < (self.get("first_k_dense_replace") or 0)
        return not dense and number not in (self.get("mlp_only_layers") or ()) and (number + 1) % step == 0

    def _experts(self) -> Experts:
        hidden = self.number("hidden_size")
        size = self.number("moe_intermediate_size", self.get("intermediate_size"))
        return Experts(
            count=self.number(next(filter(self.get, EXPERTS), EXPERTS[0])),
            per_token=self.number("num_experts_per_tok"),
            linear=3 * hidden * size,
            plain=(2 * size + hidden) * self.family.expert_bias,
        )
