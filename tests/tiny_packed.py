"""Tiny models quantised as AutoAWQ, GPTQ, compressed-tensors and bitsandbytes write them.

>>> model = tiny_packed.write("awq", directory)  # the same with the weights as numbers, in fp32
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

GROUP = 32
NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
Written = tuple[dict[str, Tensor], Tensor]


def words(nibbles: Tensor) -> Tensor:
    """[.., 8] -> int32 [..]."""
    shifted = nibbles.long() << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.int32)


def in_grid(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], scales [N, K / G] in fp16 and zeros [N, K / G], nearest to a weight."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    return codes.flatten(1), scales, zeros


def as_numbers(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return (codes - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)


def awq(weight: Tensor) -> Written:
    codes, scales, zeros = in_grid(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": words(codes.T.unflatten(1, (-1, 8))[..., order]),
        "qzeros": words(zeros.T.unflatten(1, (-1, 8))[..., order]),
        "scales": scales.T.contiguous(),
    }
    return tensors, as_numbers(codes, scales, zeros)


def gptq(weight: Tensor) -> Written:
    codes, scales, zeros = in_grid(weight)
    zeros = zeros.clamp(min=1)
    tensors = {
        "qweight": words(codes.T.unflatten(0, (-1, 8)).movedim(1, -1)),
        "qzeros": words((zeros - 1).T.unflatten(1, (-1, 8))),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }
    return tensors, as_numbers(codes, scales, zeros)


def compressed(weight: Tensor) -> Written:
    codes, scales, zeros = in_grid(weight)
    tensors = {
        "weight_packed": words(codes.unflatten(1, (-1, 8))),
        "weight_scale": scales.bfloat16(),
        "weight_zero_point": words(zeros.unflatten(0, (-1, 8)).movedim(1, -1)),
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, as_numbers(codes, scales.bfloat16(), zeros)


def nf4(weight: Tensor) -> Written:
    table, groups = torch.tensor(NF4), weight.float().reshape(-1, GROUP)
    sizes = groups.abs().amax(-1).clamp(min=1e-6)
    codes = ((groups / sizes[:, None])[..., None] - table).abs().argmin(-1)
    pairs = codes.view(-1, 2).to(torch.uint8)
    state = json.dumps({"quant_type": "nf4", "blocksize": GROUP, "shape": list(weight.shape)}).encode()
    tensors = {
        "weight": pairs[:, :1] << 4 | pairs[:, 1:],
        "weight.absmax": sizes,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }
    return tensors, (table[codes] * sizes[:, None]).view_as(weight)


SCHEMES: dict[str, tuple[Callable[[Tensor], Written], dict]] = {
    "awq": (awq, {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, {"bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq"}),
    "compressed-tensors": (
        compressed,
        {
            "format": "pack-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 4, "symmetric": False, "group_size": GROUP}}},
        },
    ),
    "bitsandbytes": (nf4, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}


def write(
    kind: str, directory: Path, family: str = "llama", settings: dict | None = None, **overrides: Any
) -> PreTrainedModel:
    """A tiny model quantised in a directory. Returns: the same with the weights as numbers, in fp32.

    overrides: fields of the model's config
    """
    pack, fields = SCHEMES[kind]
    tiny.save_model(family, directory, **overrides)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                made, numbers = pack(module.weight)
                del tensors[f"{name}.weight"]
                tensors |= {f"{name}.{end}": tensor.contiguous() for end, tensor in made.items()}
                module.weight.copy_(numbers)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": kind, **fields, **(settings or {})}
    (directory / "config.json").write_text(json.dumps(config))
    return model
