"""Compile every kernel as its callers launch it, for a GPU that need not be there; run as a program.

    python compile_kernels.py 90          # compute capability 9.0; one shape of a plain format
    python compile_kernels.py 90 formats  # what every coded format and a latent cache add, at one shape
    python compile_kernels.py 90 all      # all kernels, shapes and formats; minutes
    python compile_kernels.py 90 steps    # one model's steps of several sizes, which share their kernels
    python compile_kernels.py 90 --record # adds what it found to compiled.json, with which later ones compare

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
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))
from format_fill import Filled, Rig, fill
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

SHAPES = [
    Shape(kv_heads=2, group=4, dim=128, dtype=torch.bfloat16),
    Shape(kv_heads=2, group=1, dim=80, v_dim=40, dtype=torch.float32),
    Shape(kv_heads=2, group=8, dim=64, dtype=torch.float16),
    Shape(kv_heads=2, group=3, dim=256, dtype=torch.bfloat16),
    Shape(kv_heads=2, group=4, dim=128, dtype=torch.float32),
    Shape(kv_heads=2, group=2, dim=256, dtype=torch.float32),
]
CODED = [
    Shape(kv_heads=2, group=4, dim=128, dtype=torch.bfloat16),
    Shape(kv_heads=2, group=1, dim=80, v_dim=40, block_size=24),
    Shape(kv_heads=2, group=3, dim=256, dtype=torch.float16),
    Shape(kv_heads=2, group=2, dim=256),
]
LATENT = Shape(kv_heads=1, group=128, dim=576, v_dim=512, dtype=torch.bfloat16, latent=True)
"""DeepSeek-V3's."""
SHARED = (1, 1536, 2048), (1, 2048, 768)
"""An expert, and an MLP of its size."""
SMALL = Shape(kv_heads=2, group=2, dim=64, dtype=torch.bfloat16)
CODES = [name for name, form in FORMATS.items() if not form.is_plain]
ASKS = [Ask(1, 700), Ask(1, 40), Ask(9, 40)]
HOW = {"softcap": 30.0, "window": 100, "sinks": torch.zeros(8)}


SM_BYTES = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
"""Shared memory of a multiprocessor, by compute capability."""
RECORDED = Path(__file__).with_name("compiled.json")
WHAT = ["-"]
"""What is being launched, for the rows."""


class NoDriver:
    """As much of a driver as compiling asks for."""

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
    compile_or_run, seen, places = JITFunction.run, set(), Counter[str]()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compile_or_run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            name = f"{WHAT[0]}: {self.__name__}"
            places[name] += 1
            rows[f"{name} {places[name]}"] = facts(kernel, capability)
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
    k, v = (torch.zeros(3, shape.kv_heads, dim) for dim in (cache.head_dim, cache.v_head_dim))
    kernels.write_kv(cache.layers[0], k, v, torch.arange(3))


def launch_format(name: str, shape: Shape) -> None:
    """Attention in the dtype of the shape over a cache of this format, and the rest."""
    w = filled(name, shape, ASKS)
    WHAT[0] = f"{name} {label(shape)}"
    launch_attention(w)
    launch_the_rest(w)


def label(shape: Shape) -> str:
    form = f"{shape.dtype}".removeprefix("torch.")
    return f"k{shape.kv_heads} g{shape.group} d{shape.dim} v{shape.v_dim or shape.dim} {form}"


def filled(name: str, shape: Shape, asks: list[Ask]) -> Filled:
    return fill(Rig(reference, FORMATS[name], shape.dtype), shape, asks)


def launch_plain(shapes: list[Shape]) -> None:
    for shape in shapes:
        w = world(shape, ASKS)
        WHAT[0] = f"plain {label(shape)}"
        launch_attention(w)
        launch_the_rest(w)
    WHAT[0] = "positions, window, softcap, sinks"
    positions = torch.zeros(1, 2, 40, dtype=torch.int32)
    moved = [replace(ask, slot_positions=positions) for ask in ASKS]
    launch_attention(world(SHAPES[0], moved), **HOW)
    WHAT[0] = "several queries, split"
    launch_attention(world(SHAPES[0], [Ask(9, 1100)]))


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


def launch_what_formats_add() -> None:
    """Kernels share the functions that decode, so one kernel of each format is enough."""
    for name in CODES:
        w = filled(name, CODED[0], [Ask(1, 40)])
        WHAT[0] = f"{name} alone"
        launch_attention(w)
        k = torch.zeros(3, 2, CODED[0].dim)
        kernels.write_kv(w.cache.layers[0], k, k, torch.arange(3))
    WHAT[0] = "latents in int4"
    launch_attention(filled("int4", LATENT, [Ask(1, 40)]))
    WHAT[0] = "scores over turboquant4"
    launch_the_rest(filled("turboquant4", SMALL, [Ask(1, 700)]))
    WHAT[0] = "scores over latents"
    launch_the_rest(filled("bf16", LATENT, [Ask(1, 700)]))


def main() -> None:
    capability, rows = int(sys.argv[1]), {}
    compile_instead_of_launching(capability, rows)
    if "all" in sys.argv:
        launch_plain(SHAPES)
        launch_packed(KINDS)
        launch_layers([3])
        launch_experts([3])
        launch_latents([3])
        for name in CODES:
            for shape in CODED:
                launch_format(name, shape)
        for name in ("bf16", *CODES):
            launch_format(name, LATENT)
    elif "formats" in sys.argv:
        launch_what_formats_add()
    elif "steps" in sys.argv:
        launch_steps()
    else:
        launch_plain(SHAPES[:1])
        launch_packed(["zero", "q6_k"])
        launch_layers([3])
        launch_experts([3])
        launch_latents([3])
    print(json.dumps({"what": "triton", "version": version()}))
    for name, row in rows.items():
        print(json.dumps({"what": name} | row))
    if "--record" in sys.argv:
        known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        known.setdefault(version(), {}).setdefault(f"sm_{capability}", {}).update(rows)
        lines = json.dumps(known, indent=1, sort_keys=True)
        RECORDED.write_text(
            re.sub(r"\{\s+(\"blocks[^{}]*?)\s+\}", lambda m: "{" + " ".join(m[1].split()) + "}", lines) + "\n"
        )


def version() -> str:
    """Major and minor of Triton: with each comes a compiler of its own."""
    return ".".join(triton.__version__.split(".")[:2])


if __name__ == "__main__":
    main()
