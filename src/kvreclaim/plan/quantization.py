"""A quantization_config: the format of a checkpoint's weights, and the modules that it leaves out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from kvreclaim.plan.shapes import LayerShape

UNKNOWN = "unknown:"
LEFT_OUT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
"""Keys under which methods list modules that keep the model's dtype."""
NEVER_PACKED = re.compile(
    r"(head|embed\w*|tokens|\w*norm\w*|gate|router|visual|vision\w*|multi_modal\w*)\W*$"
)
"""Last words of modules that no format packs, or that are not counted."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def quantization_of(config: object) -> str | None:
    """The format of --weights auto for a config with this quantization_config.

    Returns: a name of WEIGHTS; the bits of a weight with its scales apart; "group:bits:size", or
    "scaled:bits:size" without zero points; or UNKNOWN and a reason.
    """
    if config is None:
        return None
    given: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    method = str(given.get("quant_method"))
    read = _METHODS.get(method)
    found = None if read is None else read(given)
    return f"{UNKNOWN}of method {method}" if found is None else found


def _grouped(given: Mapping[str, Any]) -> str | None:
    return _group(given.get("bits"), given.get("group_size"))


def _group(bits: object, size: object, *, zeros: bool = True) -> str | None:
    """size: -1 or None for one group a row."""
    if not isinstance(bits, int) or not isinstance(size, int | None):
        return None
    if size is None or size == -1:
        return f"{bits}"
    return f"{'group' if zeros else 'scaled'}:{bits}:{size}" if size > 0 else None


def _compressed_tensors(given: Mapping[str, Any]) -> str | None:
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping):
        return _modelopt(given)
    found = {_weights_of(group) for group in groups.values() if isinstance(group, Mapping)}
    return found.pop() if len(found) == 1 else None


def _weights_of(group: Mapping[str, Any]) -> str | None:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return None
    bits, size = weights.get("num_bits"), weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if size else "tensor")
    if weights.get("type") == "float":
        if bits == 4:
            return {16: "nvfp4", 32: "mxfp4-all"}.get(size if isinstance(size, int) else 0)
        return "fp8" if bits == 8 and strategy == "block" else _group(bits, None)
    if strategy in ("group", "tensor_group"):
        return _group(bits, size, zeros=weights.get("symmetric") is False)
    return _group(bits, None)


def _modelopt(given: Mapping[str, Any]) -> str | None:
    algorithm = str(given.get("quant_algo")).upper()
    if "config_groups" in given and algorithm != "MIXED_PRECISION":
        return _compressed_tensors(given)
    size = given.get("group_size")
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ"):
        return _group(4, size if size is not None else 128, zeros=False)
    return {
        "FP8": "8",
        "FP8_PB_WO": "fp8",
        "FP8_PB_REAL": "fp8",
        "NVFP4": "nvfp4",
        "W8A8_SQ_PER_CHANNEL": "8",
    }.get(algorithm)


def _hqq(given: Mapping[str, Any]) -> str | None:
    settings = given.get("quant_config", {}).get("weight_quant_params", {})
    return _group(settings.get("nbits"), settings.get("group_size"))


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "auto-round": _grouped,
    "awq": _grouped,
    "bitsandbytes": lambda given: "nf4" if given.get("load_in_4bit") else "int8",
    "compressed-tensors": _compressed_tensors,
    "eetq": lambda _: "int8",
    "fbgemm_fp8": lambda _: "8",
    "fp8": lambda given: "fp8" if given.get("weight_block_size") else "8",
    "gptq": _grouped,
    "hqq": _hqq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": lambda _: "mxfp4",
}


def with_left_out(layers: Sequence[LayerShape], config: object) -> tuple[tuple[LayerShape, ...], str | None]:
    """The layers, with the linear weights that the quantization_config leaves in the model's dtype; and
    UNKNOWN with a module that is only a part of what is counted together, if it leaves out such a one.
    """
    given: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    patterns = [str(each) for key in LEFT_OUT for each in given.get(key) or ()]
    open_ones = {each for each in patterns if not NEVER_PACKED.search(each)}
    if given.get("quant_method") == "mxfp4" or not open_ones:
        return tuple(layers), None
    used, found = set[str](), []
    for number, layer in enumerate(layers):
        kept = 0
        for size, modules in _parts(layer, number):
            hits = [{each for each in open_ones if _matches(each, module)} for module in modules]
            if any(hits) and (size is None or not all(hits)):
                return tuple(layers), _apart(min(set().union(*hits)))
            kept += (size or 0) * any(hits)
            used |= set().union(*hits)
        found.append(replace(layer, kept=kept))
    unused = sorted(open_ones - used)
    return tuple(found), _apart(unused[0]) if unused else None


def _apart(pattern: str) -> str:
    return f"{UNKNOWN}that leaves {pattern!r} in the model's dtype, which is not counted apart"


def _parts(layer: LayerShape, number: int) -> Iterator[tuple[int | None, list[str]]]:
    """Linear weights that are counted together, None where they cannot be left out, and their modules."""
    start = f"model.layers.{number}"
    if layer.attends:
        names = LATENT if layer.latent else ATTENTION
        yield layer.attention, [f"{start}.self_attn.{each}" for each in names]
    if layer.experts is None:
        yield (
            None if layer.is_recurrent else layer.linear - layer.attention,
            [f"{start}.mlp.{each}" for each in MLP],
        )
    else:
        yield None, [f"{start}.mlp.experts.0.{each}" for each in MLP]


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    if "*" in pattern:
        return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
    return f".{pattern}." in f".{module}."
