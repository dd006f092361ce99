"""Compile every kernel as its callers launch it, for a GPU that need not be there; run as a program.

    python compile_kernels.py 90             # compute capability 9.0; one shape of a plain format
    python compile_kernels.py 90 steps       # one model's steps of several sizes, which share their kernels
    python compile_kernels.py 90 plain int8  # shapes of models, over plain caches and over int8 (SETS)
    python compile_kernels.py 90 all         # base and all SETS; half an hour
    python compile_kernels.py 90 --record    # adds what it found to compiled.json, with which tests compare

Prints a JSON object per compiled variant: what was launched, the kernel, its registers, bytes of stack
(spills) and of shared memory, whether it has tensor-core instructions, the widest of its asynchronous loads
in bytes, and how many blocks fit on a multiprocessor. Launches become compilations, so results are whatever
was in memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))
from format_fill import Rig, fill
from paged_oracle import Ask, Shape, World, under, world
from random_rows import KINDS, random_rows

from kvreclaim.ops import reference
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.layer_parts import ClampedGate, Heads, LatentHeads, Norm
from kvreclaim.ops.packed import PackedMatrix
from kvreclaim.ops.rope import RopeLayout
from kvreclaim.ops.triton import attention, decoder, experts, latent, packed, scoring

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [
    Shape(2, 4, 128, dtype=BF16),
    Shape(2, 8, 64, dtype=BF16),
    Shape(2, 4, 192, dtype=BF16),
    Shape(2, 2, 256, dtype=BF16),
    Shape(2, 4, 128, dtype=FP32),
    Shape(2, 2, 256, dtype=FP32),
]
"""Shapes of models, over plain caches."""
ATTENDED = [
    Shape(1, 4, 128, dtype=BF16),
    Shape(2, 7, 128, dtype=BF16),
    Shape(2, 16, 128, dtype=BF16),
    Shape(2, 4, 128, block_size=32, dtype=FP16),
    Shape(2, 8, 128, block_size=64, dtype=BF16),
    Shape(2, 3, 64, dtype=FP16),
    Shape(2, 1, 64, dtype=FP32),
    Shape(2, 1, 80, dtype=BF16),
    Shape(2, 1, 80, v_dim=40, dtype=FP32),
    Shape(2, 1, 96, dtype=BF16),
    Shape(2, 1, 192, v_dim=128, dtype=BF16),
    Shape(2, 3, 256, dtype=FP16),
]
"""Likewise, attention alone."""
CODED = [Shape(2, 4, 128, dtype=BF16), Shape(2, 2, 256, dtype=BF16)]
CODED_ATTENDED = [
    Shape(2, 3, 64, dtype=BF16),
    Shape(2, 1, 80, v_dim=40, block_size=24, dtype=BF16),
    Shape(2, 1, 96, dtype=BF16),
    Shape(2, 4, 192, dtype=BF16),
    Shape(2, 4, 128, dtype=FP32),
    Shape(2, 2, 256, dtype=FP32),
]
LATENT = Shape(kv_heads=1, group=128, dim=576, v_dim=512, dtype=BF16, latent=True)
LITE = replace(LATENT, group=16)
"""DeepSeek-V3's and V2-Lite's."""
SHARED = (1, 1536, 2048), (1, 2048, 768)
"""An expert, and an MLP of its size."""
SMALL = Shape(kv_heads=2, group=2, dim=64, dtype=torch.bfloat16)
CODES = [name for name, form in FORMATS.items() if not form.is_plain]
ASKS = [Ask(1, 700), Ask(1, 40), Ask(9, 40)]
OTHER_ASKS = [Ask(1, 40), Ask(9, 1100)]
"""What is split over keys in ASKS is whole here, and the reverse."""
HOW = {"softcap": 30.0, "window": 100, "sinks": torch.zeros(8)}

SM_BYTES = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
"""Shared memory of a multiprocessor, by compute capability."""
RECORDED = Path(__file__).with_name("compiled.json")
FACTS = ("registers", "stack", "shared", "tensor_cores", "cp_async", "blocks")
WHAT = ["-"]
"""What is being launched, for the rows."""
SEEN: set[str] = set()
"""Hashes of the kernels that have a row."""


class NoDriver:
    """The part of a driver that compilation needs."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def facts(kernel: Any, capability: int) -> dict[str, Any]:
    """Registers, stack, shared memory, tensor-core instructions, asynchronous loads and occupancy of a
    compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(program), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(size) for name, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    meta, threads = kernel.metadata, kernel.metadata.num_warps * 32
    products = re.search(r"wgmma\.mma_async|tcgen05\.mma|\bmma\.sync", kernel.asm["ptx"])
    loads = re.findall(r"cp\.async\.c[ag]\.shared\.global[^\n]*?, (0x[0-9a-f]+)", kernel.asm["ptx"])
    fit = (
        65536 // (used["REG"] * threads),
        SM_BYTES[capability] // (meta.shared + 1024),
        (1536 if capability in (86, 89, 120) else 2048) // threads,
    )
    return {
        "registers": used["REG"],
        "stack": used["STACK"] + used["LOCAL"],
        "shared": meta.shared,
        "tensor_cores": products is not None,
        "cp_async": max((int(width, 16) for width in loads), default=0),
        "blocks": min(fit),
    }


def compile_instead_of_launching(capability: int, rows: dict[str, dict[str, Any]]) -> None:
    """rows: gets the facts of each variant by what was launched, kernel and place among those."""
    triton.runtime.driver.set_active(NoDriver(capability))
    compile_or_run, places = JITFunction.run, defaultdict[str, list[str]](list)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compile_or_run(self, *args, grid=grid, warmup=True, **options)
        name = f"{WHAT[0]}: {self.__name__}"
        if kernel.hash not in places[name]:
            places[name].append(kernel.hash)
            if kernel.hash not in SEEN:
                rows[f"{name} {len(places[name])}"] = facts(kernel, capability)
            SEEN.add(kernel.hash)
        return kernel

    JITFunction.run = run
    for module in (attention, experts, latent, packed, scoring):
        module.dot_precision = lambda device: "tf32x3"
    attention.shared_bytes = lambda device: SM_BYTES[capability] - 1024


def launch_attention(w: World, **how: Any) -> None:
    kernels.paged_attention(w.q[0], under(w.cache, 0, scale=0.1, **how), w.batch)


def launch_the_rest(w: World, tokens: int = 700) -> None:
    shape, cache, kept = w.shape, w.cache, torch.arange(0, tokens * 6 // 7, 2)
    ids = torch.from_numpy(w.batch.sequences[0].block_ids).long()
    bands = (shape.dim - shape.v_dim if shape.latent else shape.dim) // 2
    layout = RopeLayout(torch.ones(bands, dtype=torch.float64), start=shape.dim - 2 * bands)
    heads, centers = shape.heads, torch.zeros(shape.heads, 16, 5, shape.dim)
    kernels.trig_norm_scores(
        PagedTokens(cache.layers[0], ids, tokens),
        torch.zeros(heads, 1, shape.dim),
        torch.zeros(heads, bands),
        layout,
    )
    over = slice(4, tokens * 6 // 7)
    kernels.mixture_scores(PagedTokens(cache.layers[0], ids, tokens), centers, centers[:, :, 0], 0.1, over)
    kernels.token_norms(PagedTokens(cache.layers[0], ids, tokens), values=False)
    for owners in (None, torch.zeros_like(ids)):
        width = shape.dim - bands + cache.v_head_dim + 3
        rows = torch.zeros(cache.num_kv_heads, width)
        kernels.surrogate_scores(PagedTokens(cache.layers[0], ids, tokens), rows, layout, owners)
    kernels.gather_tokens(PagedTokens(cache.layers[0], ids, tokens))
    kernels.copy_blocks(cache, [(1, 2)])
    kernels.compact(cache, kept[None, None], ids, ids[: -(-len(kept) // shape.block_size)])
    for count in (3, 4096):
        k, v = (torch.zeros(count, shape.kv_heads, dim) for dim in (cache.head_dim, cache.v_head_dim))
        kernels.write_kv(cache.layers[0], k, v, torch.arange(count))


def launch_cache(name: str, shapes: list[Shape], attended: Iterable[Shape] = ()) -> None:
    """Attention in the dtype of each shape over a cache of this format, and the rest; over those attended,
    attention alone."""
    for shape in (*shapes, *attended):
        WHAT[0] = f"{name} {label(shape)}"
        w = filled(name, shape, ASKS)
        launch_attention(w)
        if shape in shapes:
            launch_the_rest(w)


def label(shape: Shape) -> str:
    form = f"{shape.dtype}".removeprefix("torch.")
    blocks = f" s{shape.block_size}" if shape.block_size != 16 else ""
    return f"k{shape.kv_heads} g{shape.group} d{shape.dim} v{shape.v_dim or shape.dim} {form}{blocks}"


def filled(name: str, shape: Shape, asks: list[Ask]) -> World:
    if name == "plain":
        return world(shape, asks)
    return fill(Rig(reference, FORMATS[name], shape.dtype), shape, asks)


def launch_base() -> None:
    launch_cache("plain", SHAPES[:1])
    launch_options([HOW])
    WHAT[0] = "several queries, split"
    launch_attention(world(SHAPES[0], [Ask(9, 1100)]))
    launch_packed(["zero", "q6_k"])
    launch_layers([3])
    launch_experts([3])
    launch_latents([3])


def launch_options(options: Iterable[dict[str, Any]]) -> None:
    """Attention with some of HOW; a window is one of positions, too."""
    positions = torch.zeros(1, 2, 40, dtype=torch.int32)
    moved = [replace(ask, slot_positions=positions) for ask in ASKS]
    for how in options:
        WHAT[0] = ", ".join((["positions"] if "window" in how else []) + list(how))
        launch_attention(world(SHAPES[0], moved), **how)


def launch_packed(kinds: Iterable[str]) -> None:
    """Products with packed weights, in the model's dtype and in fp32."""
    for kind in kinds:
        WHAT[0] = f"packed {kind}"
        matrix = PackedMatrix([random_rows(kind, 128, 512)], 128)
        packed.unpack_rows(matrix, torch.arange(3), torch.bfloat16)
        packed.packed_linear(torch.zeros(3, 512, dtype=torch.bfloat16), [matrix])
        packed.packed_linear(torch.zeros(3, 512), [matrix], activations="exact")
        x, residual = torch.zeros(3, 512, dtype=torch.bfloat16), torch.zeros(3, 128, dtype=torch.bfloat16)
        packed.packed_linear(x, [matrix], residual[0], residual=residual)


def launch_layers(counts: Iterable[int]) -> None:
    """What lies between the products of layers, in steps of so many tokens."""
    WHAT[0] = "layers bfloat16"
    weight, head = (Norm(torch.zeros(size, dtype=torch.bfloat16), 1e-6) for size in (4096, 128))
    for count in counts:
        x, rows = (torch.zeros(count, size, dtype=torch.bfloat16) for size in (4096, 48 * 128))
        decoder.rms_norm(x, weight.weight, 1e-6)
        decoder.rms_norm(x, weight.weight, 1e-6, from_one=True)
        decoder.add_rms_norm(x, x, weight)
        for heads in (Heads(32, 8, 128), Heads(32, 8, 128, head, head)):
            decoder.rotate(rows, x[:, :128], x[:, :128], heads)
        decoder.gate(x)
        other, part = Norm(head.weight, 1e-6, from_one=True), Norm(weight.weight[:1024], 1e-6)
        decoder.add_rms_norm(x, x, weight, weight)
        decoder.add_rms_norm(x, x, None, weight)
        for heads in (Heads(32, 8, 128, other, other, True), Heads(32, 8, 128, weight, part)):
            decoder.rotate(rows, x[:, :64], x[:, :64], heads)
        decoder.gate(x, "gelu_tanh")
        decoder.rotate(rows, x[:, :32], x[:, :32], Heads(32, 8, 128, half_angles=True))
        decoder.add_rms_norm(x, x, weight, wide=x.float())


def launch_experts(counts: Iterable[int]) -> None:
    """A mixture of experts in steps of so many tokens, in bf16 and, with the wider sums, in fp32."""
    for count in counts:
        for kind, dtype in (("silu", torch.bfloat16), ("gelu_tanh", torch.bfloat16), ("silu", torch.float32)):
            WHAT[0] = f"experts {dtype}".replace("torch.", "")
            choice = experts.RouterChoice(8, sums_to_one=dtype is torch.bfloat16)
            scores, ids = experts.route(torch.zeros(count, 128, dtype=dtype), choice)
            weights = (torch.empty(size, dtype=dtype) for size in ((1, 1536, 2048), (1, 2048, 768)))
            x = torch.zeros(count, 2048, dtype=dtype)
            experts.apply_experts(x, (ids, scores), experts.ExpertWeights(*weights), kind)
        WHAT[0] = "experts and an MLP bfloat16"
        own, x = [torch.empty(size, dtype=torch.bfloat16) for size in SHARED], x.to(torch.bfloat16)
        of_all = own[0][0], own[1][0]
        routed, how = (ids, scores), {"shared": of_all, "residual": x}
        experts.apply_experts(x, routed, experts.ExpertWeights(*own), "silu", **how)
        WHAT[0], choice = "groups of experts", experts.RouterChoice(8, True, True, 8, 4, 2.5)
        experts.route(torch.zeros(count, 256), choice, torch.zeros(256))
        WHAT[0], kind = "clamped experts bfloat16", ClampedGate(1.702, 7.0)
        sizes = (1, 2048, 1536), (1, 768, 2048), (1, 1536), (1, 2048)
        gate_up, down, *biases = (torch.empty(size, dtype=torch.bfloat16) for size in sizes)
        weights = experts.ExpertWeights(gate_up, down, tuple(biases), True, True)
        experts.apply_experts(x, (ids, scores.to(torch.bfloat16)), weights, kind)


def launch_latents(counts: Iterable[int]) -> None:
    """What lies between the products of DeepSeek-V3's attention, in steps of so many tokens."""
    WHAT[0], dtype = "latents bfloat16", torch.bfloat16
    cache = world(LATENT, [Ask(1, 40)]).cache
    weights = [Norm(torch.zeros(size, dtype=dtype), 1e-6) for size in (512, 1536)]
    heads = LatentHeads(128, 64, 512, *weights, True)
    up = torch.zeros(128, 256, 512, dtype=dtype)[:, :128]
    for count in counts:
        rows, angles = torch.zeros(count, 1536 + 576, dtype=dtype), torch.zeros(count, 64, dtype=dtype)
        slots = torch.zeros(count, dtype=torch.int64)
        for place in (None, (cache.layers[0], slots)):
            latent.split_rows(rows, (angles, angles), heads, place)
        q = torch.zeros(count, 128, 192, dtype=dtype)
        latent.absorb(q, (angles, angles), heads, up)
        latent.rotate_queries(q, (angles, angles), heads)


def launch_steps() -> None:
    """Tables of one block, of a multiple of 16 and of others; layers 0, 1 and 2; counts of tokens alike."""
    for asks in ([Ask(1, 10)], [Ask(1, 256)], [Ask(1, 700), Ask(9, 40)], [Ask(1, 3000), Ask(9, 1000)]):
        w = world(replace(SMALL, layers=3), asks)
        WHAT[0] = "steps"
        for layer in range(3):
            kernels.paged_attention(w.q[layer], under(w.cache, layer, scale=0.1), w.batch)
        launch_the_rest(w, asks[0].seq_len)
    launch_layers((1, 2, 16, 33))
    launch_experts((1, 2, 16, 33))
    launch_latents((1, 2, 16, 33))


def launch_rarer() -> None:
    """What no other set has: each option alone, splits the other way round."""
    launch_options({name: value} for name, value in HOW.items())
    WHAT[0] = "window"
    launch_attention(world(SHAPES[0], ASKS), window=100)
    for name in ("plain", *CODES):
        WHAT[0] = f"{name}, the other splits"
        launch_attention(filled(name, SHAPES[0], OTHER_ASKS))


SETS: dict[str, Callable[[], None]] = {
    "plain": partial(launch_cache, "plain", SHAPES, ATTENDED),
    "rarer": launch_rarer,
    "packed": partial(launch_packed, KINDS),
    **{name: partial(launch_cache, name, CODED, CODED_ATTENDED) for name in CODES},
    **{f"{name} latents": partial(launch_cache, name, [LATENT], [LITE]) for name in ("bf16", *CODES)},
}
"""Shapes, formats and options of models."""


def main() -> None:
    capability, rows = int(sys.argv[1]), {}
    compile_instead_of_launching(capability, rows)
    for name in [each for each in sys.argv[2:] if each != "--record"] or ["base"]:
        for each in ("base", *SETS) if name == "all" else (name,):
            SEEN.clear()
            {"base": launch_base, "steps": launch_steps, **SETS}[each]()
    print(json.dumps({"what": "triton", "version": version()}))
    for name, row in rows.items():
        print(json.dumps({"what": name} | row))
    if "--record" in sys.argv:
        record(capability, rows)


def record(capability: int, rows: dict[str, dict[str, Any]]) -> None:
    """Add rows to compiled.json: variant -> version and capability -> FACTS in this order."""
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name, row in rows.items():
        known.setdefault(name, {})[f"{version()} sm_{capability}"] = [int(row[fact]) for fact in FACTS]
    lines = [f"{json.dumps(name)}: {json.dumps(known[name], sort_keys=True)}" for name in sorted(known)]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def version() -> str:
    """Major and minor of Triton: with each comes a compiler of its own."""
    return ".".join(triton.__version__.split(".")[:2])


if __name__ == "__main__":
    main()
