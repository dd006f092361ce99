"""From a transformers config.json or a GGUF header to a ModelShape, without transformers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvreclaim.checks import parse_json, require
from kvreclaim.config import KV_CACHE_DTYPE_ALIASES
from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.model.gguf_index import EMBEDDING, GgufIndex, GgufTensor, quoted, read_index, rope_scaling
from kvreclaim.model.position_limit import position_limit
from kvreclaim.plan.config_reader import ConfigReader
from kvreclaim.plan.families import COMPOSITE, DEFAULTS
from kvreclaim.plan.hybrid_reader import HybridReader
from kvreclaim.plan.quantization import quantization_of, with_left_out
from kvreclaim.plan.shapes import ModelShape, StoredWeights

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "qwen3moe": "qwen3_moe",
        "gemma": "gemma",
        "gemma2": "gemma2",
        "gemma3": "gemma3_text",
        "phi3": "phi3",
        "gpt-oss": "gpt_oss",
        "glm4": "glm4",
        "olmo2": "olmo2",
        "smollm3": "smollm3",
        "granite": "granite",
        "seed_oss": "seed_oss",
    }
)
"""llama.cpp's names, and transformers' model_type; a llama with experts is a mixtral."""
NEEDED = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
    }
)
OPTIONAL = MappingProxyType(
    {
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
)
"""Without them a model has as many KV heads as heads, which share hidden_size, no windows and no experts."""
HEAD = "output.weight"


def config_of(index: GgufIndex, file: Path) -> dict[str, Any]:
    """The config as transformers would write it. Raises: InvalidArgumentError, UnsupportedModelError."""
    fields = index.fields
    kind = str(fields.get("general.architecture"))
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.name} is of the architecture {quoted(kind)}, which is not read from GGUF here; known are "
            f"{', '.join(ARCHITECTURES)}."
        )
    lacking = [key for key in NEEDED if f"{kind}.{key}" not in fields]
    require(
        not lacking and EMBEDDING in index.tensors,
        f"{file.name} does not say {', '.join(lacking) or EMBEDDING}, or says it for each layer; name the "
        "config.json of the model it was made of.",
        "model",
    )
    config = {name: fields.get(f"{kind}.{key}") for key, name in (NEEDED | OPTIONAL).items()}
    model_type = "mixtral" if kind == "llama" and config["num_experts"] else ARCHITECTURES[kind]
    names = index.tensors.keys()
    return config | {
        "model_type": model_type,
        "dtype": "bfloat16",
        "rope_parameters": rope_scaling(fields),
        "vocab_size": index.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "attention_out_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
    }


def weighed(shape: ModelShape, index: GgufIndex, file: Path) -> ModelShape:
    """Return the shape with the sizes of the file's tensors. Raises: UnsupportedModelError if they are not
    those of the shape."""
    if index.num_weights != shape.num_params:
        raise UnsupportedModelError(
            f"{file.name} holds {index.num_weights:,} weights, where its header describes a "
            f"{shape.model_type} of {shape.num_params:,}; a plan would be wrong: name the config.json of the "
            "model it was made of."
        )
    return replace(shape, stored=_stored(index.weights))


def _stored(tensors: Iterable[GgufTensor]) -> StoredWeights:
    kinds, embedding, routed, total = Counter[str](), 0, 0, 0
    tied = True
    for tensor in tensors:
        kinds[tensor.kind] += 1
        total += tensor.num_bytes
        routed += tensor.num_bytes * ("_exps." in tensor.name)
        embedding += tensor.num_bytes * (tensor.name == EMBEDDING)
        tied = tied and tensor.name != HEAD
    return StoredWeights(tuple(kinds.most_common()), total, routed, 0 if tied else embedding)


BUNDLED = Path(__file__).parent / "data" / "models"
FURTHER = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
"""Keys of the number of layers that predict further tokens."""
ABOUT = "kvreclaim"
"""Key of a bundled file under which names, source and date stand."""


def bundled_models() -> dict[str, Path]:
    """Files of configs that come with the package, by each of their names, the hub's id first."""
    names: dict[str, Path] = {}
    for path in sorted(BUNDLED.glob("*.json")):
        about = parse_json(path.read_text(encoding="utf-8"))[ABOUT]
        names.update(dict.fromkeys(about["names"], path))
    return names


def load_shape(model: str | Path) -> ModelShape:
    """The shape of a bundled name in any case, a directory with a config.json, such a file, or a GGUF file.

    Raises: InvalidArgumentError if there is none, UnsupportedModelError if its layers are not known here.
    """
    path = _find(str(model))
    if path.suffix.lower() == ".gguf":
        index = read_index(path)
        return weighed(shape_of(config_of(index, path), path.stem), index, path)
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"--model: {str(path)!r} cannot be read as JSON ({error}); name a transformers config.json.",
            field="model",
        ) from error
    require(
        isinstance(config, dict), f"--model: {str(path)!r} holds no JSON object; name a config.json.", "model"
    )
    modelopt = path.with_name("hf_quant_config.json")
    if "quantization_config" not in config and modelopt.is_file():
        config["quantization_config"] = {"quant_method": "modelopt", **_quantization(modelopt)}
    if path.parent == BUNDLED:
        return shape_of(config, config[ABOUT]["names"][0])
    return shape_of(config, path.parent.name if path.name == "config.json" else path.stem)


def _quantization(file: Path) -> dict[str, Any]:
    """Read NVIDIA ModelOpt's file next to the config. Raises: InvalidArgumentError."""
    try:
        return dict(parse_json(file.read_text(encoding="utf-8"))["quantization"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidArgumentError(
            f"--model: {str(file)!r} cannot be read ({type(error).__name__}: {error}); download it again.",
            field="model",
        ) from error


def _find(model: str) -> Path:
    path = Path(model, "config.json") if os.path.isdir(model) else Path(model)
    if os.path.isfile(path):
        return path
    known = bundled_models()
    by_case = {name.lower(): file for name, file in known.items()}
    if found := by_case.get(model.lower()):
        return found
    listed = ", ".join(dict.fromkeys(_first_names()))
    raise InvalidArgumentError(
        f"--model {model!r} is no directory with a config.json, no such file, no .gguf file, and none of the "
        f"configs that come with kvreclaim: {listed}.",
        field="model",
    )


def _first_names() -> list[str]:
    seen: dict[Path, str] = {}
    for name, path in bundled_models().items():
        seen.setdefault(path, name)
    return list(seen.values())


CLASS_ROPES: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    }
}
"""Rotations that classes of transformers have where a config names none."""


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of a parsed config.json. name: as answers call the model. Raises: UnsupportedModelError,
    InvalidArgumentError."""
    outer, notes, kind = config, [], str(config.get("model_type"))
    part = COMPOSITE.get(kind)
    if part is not None:
        config = {"model_type": part.inner, **_language_model(config, part.key, name)}
        notes.append("the vision tower is not counted")
    reader = ConfigReader(config, name)
    if reader.family.mixer:
        reader = HybridReader(config, name)
    notes += _further_tokens(config, outer)
    quantized = outer.get("quantization_config", config.get("quantization_config"))
    layers, reason = with_left_out(reader.layers(), quantized)
    tied = reader.get("tie_word_embeddings")
    if part is not None and part.ties:
        tied = outer.get("tie_word_embeddings", DEFAULTS[kind]["tie_word_embeddings"])
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
        max_position=position_limit({**CLASS_ROPES.get(reader.kind, {}), **config}, reader.max_position()),
        tied=bool(tied),
        layers=layers,
        final_plain=reader.final_plain(),
        quantization=reason or quantization_of(quantized),
        notes=tuple(notes),
    )


def _language_model(config: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """Its config within that of a composite model; where it is left out, what the class takes instead."""
    kind = str(config["model_type"])
    found = config.get(key)
    found = DEFAULTS[kind][key] if found is None else found
    require(
        isinstance(found, dict),
        f"config.json of {name} ({kind}): {key} is {str(found)[:60]!r}; it must be an object.",
        "model",
    )
    return found


def _further_tokens(*configs: Mapping[str, Any]) -> list[str]:
    """A note of layers for multi-token prediction."""
    for key in FURTHER:
        if count := next((found for each in configs if (found := each.get(key))), None):
            return [f"MTP layers ({key} = {count}) are left out; speculative decoding alone loads them"]
    return []


def _dtype(name: object) -> str | None:
    text = str(name).removeprefix("torch.") if name else None
    return KV_CACHE_DTYPE_ALIASES.get(text, text) if text else None
