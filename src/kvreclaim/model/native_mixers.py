"""Recurrent layers in three native calls for all tokens of a step: all inner projections, the layer's step
from slot to slot, the outer projection. Mamba-1's step is four calls: two more products lie between its
convolution and its scan.

A layer is taken by the names of its parts (gated delta rule: Qwen3-Next's and Qwen3.5's; Mamba-2: what Bamba,
Falcon-H1, Granite 4, Nemotron-H and Zamba 2 share; Jamba's Mamba-1; the short convolution of LFM2), and
proved by running it on trial states against its own code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from kvreclaim.model.decoder import agree, is_taken, joined, norm_of, single, weight_dtype
from kvreclaim.model.native_modules import NativeLinear
from kvreclaim.model.quantized.layers import PackedLinear
from kvreclaim.model.recurrent import Mixer, RecurrentLayers
from kvreclaim.ops.native.recurrent import (
    Convolution,
    DeltaStep,
    SelectiveScan,
    ShortConvStep,
    SiluConvStep,
    SsdStep,
    missing_steps,
)
from kvreclaim.ops.states import PackedRuns, StateRun, States, StateStep, StateStore

TRIAL_SLOTS = 6
TRIAL = (
    (StateRun(0, 7, None, [0]), StateRun(7, 4, None, [1])),
    (StateRun(0, 1, 0, [2]), StateRun(1, 4, 1, [3, 4])),
    (StateRun(0, 1, 2, [5]), StateRun(1, 1, 4, [0])),
)
"""Steps of two texts: both begin; one decodes beside a prompt's tokens and a draft; both decode."""
QKVZ_BA = ("in_proj_qkvz", "in_proj_ba")
NAMES = (QKVZ_BA, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj",))


class SelectiveStep:
    """Mamba-1's step between its projections. A row: x, then z."""

    def __init__(self, module: Any) -> None:
        norm, self.rank = norm_of(module.dt_layernorm), module.dt_proj.in_features
        self.width = module.out_proj.in_features
        self.convolve = SiluConvStep(_convolution(module.conv1d, [(0, self.width)]))
        self.choose, self.widen = single(module.x_proj), joined([module.dt_proj], norm)
        norms = (module.b_layernorm.weight.detach(), module.c_layernorm.weight.detach())
        eps = module.b_layernorm.forward.eps
        self.scan = SelectiveScan(-_vector(module.A_log).exp(), _vector(module.D), norms, eps)

    def __call__(self, rows: Tensor, runs: PackedRuns, conv: Tensor, states: Tensor) -> Tensor:
        x = self.convolve(rows, runs, conv)
        chosen = self.choose(x)  # dt, B and C
        dt = self.widen(chosen[:, : self.rank].contiguous())
        return self.scan(x, dt, rows[:, self.width :], chosen[:, self.rank :], runs, states)


class NativeMixer:
    """A recurrent layer's part of a step: [T, hidden] -> [T, hidden], from slots to slots."""

    def __init__(self, module: Any, projections: list[Any]) -> None:
        self.inner, self.outer = joined(projections, None), single(module.out_proj)
        self.multiplier = float(getattr(module, "ssm_in_multiplier", 1.0))
        scales = getattr(module, "mup_vector", None)
        self.scales = None if scales is None or bool((scales == 1).all()) else scales.flatten()
        self.step: Any = _step(module)

    def __call__(self, x: Tensor, states: States, runs: PackedRuns) -> Tensor:
        rows = self.inner(x if self.multiplier == 1.0 else x * self.multiplier)
        if self.scales is not None:
            rows = rows * self.scales
        found: Tensor = self.step(rows, runs, *states.values())
        return self.outer(found)


def use_native_mixers(layers: RecurrentLayers) -> str:
    """Give every recurrent layer that computes what a NativeMixer computes that for the engine's steps.

    Returns: one line that describes the native mixers.
    """
    problem = missing_steps()
    if problem is None:
        for mixer in layers.mixers:
            mixer.use_native(_proved(mixer))
    count = sum(mixer.native is not None for mixer in layers.mixers)
    why = f" ({problem})" if problem else ""
    return f"recurrent layers: {len(layers.mixers)}, {count} of them native{why}"


def _projections(module: Any) -> list[Any] | None:
    """Return the linear layers in front, if these and the others are of kinds that the kernels take."""
    found = next((each for names in NAMES if None not in (each := _parts(module, names))), None)
    if found is None:
        return None
    between = [getattr(module, name) for name in ("x_proj", "dt_proj") if hasattr(module, name)]
    linears = [*found, *between, getattr(module, "out_proj", None)]
    if not all(type(each) in (nn.Linear, NativeLinear, PackedLinear) for each in linears):
        return None
    dtypes = {weight_dtype(each) for each in linears}
    same = len(dtypes) == 1 and all(is_taken(each) for each in linears)
    mixed = len({(type(each) is PackedLinear, each.bias is None) for each in found}) > 1
    return found if same and not mixed else None


def _parts(module: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(module, name, None) for name in names]


@torch.inference_mode()
def _proved(mixer: Mixer) -> NativeMixer | None:
    """Return the layer in native calls, if it agrees with the layer's own code on trial states and inputs."""
    module, projections = mixer.module, _projections(mixer.module)
    if projections is None or [one.kind for one in mixer.shapes] not in (["conv"], ["conv", "recurrent"]):
        return None
    try:
        native = NativeMixer(module, projections)
    except (AttributeError, TypeError, ValueError):  # other parts by the same names
        return None
    mixer.go_by_token(isinstance(native.step, SelectiveStep))  # transformers' own scan begins at zero
    generator, dtype = torch.Generator().manual_seed(0), native.outer.dtype
    own, other = (StateStore([mixer.shapes], TRIAL_SLOTS, torch.device("cpu")) for _ in range(2))
    pairs = list[tuple[Tensor, Tensor]]()
    for runs in TRIAL:
        count = runs[-1].start + runs[-1].num_tokens
        x = torch.randn((count, module.out_proj.out_features), generator=generator).to(dtype)
        want = mixer.by_own_code(StateStep(own, runs), x, {}, 0)
        pairs.append((native(x, other.layers[0], PackedRuns.of(runs)), want))
    pairs += zip(other.layers[0].values(), own.layers[0].values(), strict=True)
    return native if all(agree(one, another, dtype) for one, another in pairs) else None


def _step(module: Any) -> DeltaStep | SsdStep | SelectiveStep | ShortConvStep:
    """Raises: AttributeError, TypeError or ValueError if its parts or numbers are others."""
    if hasattr(module, "conv"):
        return ShortConvStep(_convolution(module.conv, []))
    if module.activation not in ("silu", "swish"):
        raise ValueError(module.activation)
    if hasattr(module, "x_proj"):
        return SelectiveStep(module)
    return _ssd_step(module) if hasattr(module, "in_proj") else _delta_step(module)


def _vector(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def _convolution(conv: nn.Conv1d, places: list[tuple[int, int]]) -> Convolution:
    return Convolution(conv.weight.detach().squeeze(1), conv.bias, tuple(places))


def _delta_step(module: Any) -> DeltaStep:
    """A row holds all q, all k, all v, all z, all b, all a; or q, k, v and z of one key head after the other,
    then b and a in the same way."""
    heads, groups = module.num_v_heads, module.num_k_heads
    k_dim, v_dim, share = module.head_k_dim, module.head_v_dim, module.num_v_heads // module.num_k_heads
    width = 2 * groups * k_dim + heads * v_dim
    head, group = torch.arange(heads), torch.arange(heads) // share
    if hasattr(module, QKVZ_BA[0]):
        size = 2 * k_dim + 2 * share * v_dim
        runs = [(0, k_dim), (k_dim, k_dim), (2 * k_dim, share * v_dim)]
        places = [(g * size + start, count) for start, count in runs for g in range(groups)]
        z = group * size + 2 * k_dim + (share + head % share) * v_dim
        b = groups * size + group * 2 * share + head % share
        a = b + share
    else:
        places = [(0, width)]
        z = width + head * v_dim
        b = width + heads * v_dim + head
        a = b + heads
    return DeltaStep(
        _convolution(module.conv1d, places),
        (heads, groups, k_dim, v_dim),
        torch.stack([z, b, a]),
        -_vector(module.A_log).exp(),
        _vector(module.dt_bias),
        module.norm.weight.detach(),
        float(module.norm.variance_epsilon),
    )


def _ssd_step(module: Any) -> SsdStep:
    """A row: z, then x, B and C, then dt."""
    heads, dim, groups, size = module.num_heads, module.head_dim, module.n_groups, module.ssm_state_size
    inner, width = heads * dim, heads * dim + 2 * groups * size
    least, most = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    norm = module.norm
    more: dict[str, Any] = {}
    if not isinstance(norm, nn.Identity):
        own = getattr(norm, "n_groups", None)
        more = {
            "norm": norm.weight.detach(),
            "norm_groups": inner // norm.group_size if own is None else own,
            "eps": float(norm.variance_epsilon),
            "norm_before_gate": bool(getattr(norm, "norm_before_gate", False)),
        }
    return SsdStep(
        _convolution(module.conv1d, [(inner, width)]),
        (heads, dim, groups, size),
        (0, inner + width),
        -_vector(module.A_log).exp(),
        _vector(module.D),
        _vector(module.dt_bias),
        dt_limits=(float(least), float(most)),
        **more,
    )
