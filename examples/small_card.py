"""A 4-bit model on a card of 24 GB at 1/64 scale: one long answer in processes that get no more memory.

    kvreclaim fetch
    python examples/small_card.py --json demo_out/24gb.json

Each process is limited by RLIMIT_DATA (private memory that may be written, touched or not), counted from what
the libraries have taken. SmolLM2-135M with weights of 4 bits takes 96 MB and 23,040 bytes of cache a token, a
32 B model 19.3 GB and 262,144: at 1/64 both hold the same number of tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.bench.common import sheet, show
from kvreclaim.engine.api.chat import render_chat
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model.loader import load_tokenizer, read_config
from kvreclaim.model.overrides import yarn
from kvreclaim.model_paths import real_gguf

MIB = 1 << 20
SETUPS: dict[str, dict[str, Any]] = {
    "pool for all of it": {"whole": True},
    "full cache": {},
    "budget": {"policy": "lagkv"},  # the best without calibration (docs/evidence.md)
    "int4": {"form": "int4"},
    "budget and int4": {"form": "int4", "policy": "lagkv"},
}
QUESTION = "Why do trees lose their leaves in autumn? Think step by step, and check every step."
BLOCK_SIZE, CHUNK, INTERVAL = 16, 256, 128
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
"""For the child's malloc: large pieces are unmapped as soon as they are free, and no longer counted."""
NO_MEMORY = ("allocate", "are free", "holds no block")
"""In the allocator's and the engine's sentences where memory is not enough."""
COLUMNS = {
    "": "{name}",
    "outcome": "{outcome}",
    "tokens": "{tokens:,}",
    "blocks of pool": "{num_blocks:,}",
    "most held": "{peak_blocks:,}",
    "freed": "{blocks_freed:,}",
    "MiB, peak": lambda run: f"{run['peak_bytes'] / MIB:,.0f}",
}


def taken_bytes() -> int:
    """What this process has now, as the limit counts."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def taken_by_libraries(model: Path) -> int:
    """A small model has run and the tokenizer is there: no card would hold these."""
    llm = LLM(demo_model(), num_blocks=64, max_num_seqs=1, max_num_batched_tokens=CHUNK)
    llm.generate([[1] * 300], SamplingParams(max_tokens=4, ignore_eos=True))
    del llm
    gc.collect()
    tokenizer = load_tokenizer(model)
    taken = taken_bytes()
    del tokenizer  # the model's own takes its place
    return taken


def run_limited(given: argparse.Namespace, setup: dict[str, Any]) -> dict[str, Any]:
    """The answer, or why it does not come to its end. The limit stays on this process."""
    base = taken_by_libraries(given.model)
    limits = base + int(given.limit_mib * MIB), resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    run: dict[str, Any] = {"tokens": 0, "peak_bytes": 0, "samples": []}
    try:
        generate(given, setup, base, run)
    except (ValueError, MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        run |= {"outcome": "out of memory", "said": str(error).split("\n", 1)[0]}
    run["peak_bytes"] = max(run["peak_bytes"], taken_bytes() - base)
    return run


def generate(given: argparse.Namespace, setup: dict[str, Any], base: int, run: dict[str, Any]) -> None:
    """Fill in what the answer does, step by step."""
    policy, most = setup.get("policy"), read_config(given.model).max_position_embeddings
    llm = LLM(
        given.model,
        compression=None if policy is None else CompressionConfig(policy, given.budget, interval=INTERVAL),
        hf_overrides=yarn(most, given.tokens) or {"max_position_embeddings": given.tokens},
        kv_cache_dtype=setup.get("form", given.form),
        block_size=BLOCK_SIZE,
        num_blocks=blocks_for(given.tokens, BLOCK_SIZE) if "whole" in setup else None,
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        max_signal_bytes=0,
        kv_memory_fraction=given.pool_share,
        enable_prefix_caching=False,
    )
    bytes_per_block, started = llm.engine.cache.bytes_per_block, time.perf_counter()
    run |= {"num_blocks": llm.engine.config.num_blocks, "weight_bytes": llm.loaded.weight_bytes}
    run["bytes_per_block"], samples = bytes_per_block, run["samples"]

    def on_step(step: Any) -> None:
        run["peak_bytes"] = max(run["peak_bytes"], taken_bytes() - base)
        tokens = (samples[-1][0] if samples else 0) + step.num_tokens
        samples.append((tokens, step.blocks_in_use * bytes_per_block))

    if llm.tokenizer.chat_template is None:
        prompt = list(llm.tokenizer.encode(QUESTION))
    else:
        prompt = render_chat(llm.loaded, [{"role": "user", "content": QUESTION}])
    params = SamplingParams(
        temperature=0.8, seed=0, ignore_eos=True, max_tokens=llm.engine.max_model_len - len(prompt)
    )
    (output,) = llm.generate([prompt], params, on_step=on_step)
    metrics, tokens = output.metrics, len(prompt) + len(output.outputs[0].token_ids)
    done = output.error is None and tokens == given.tokens
    run |= {
        "outcome": "done" if done else output.error or "the one sequence has all blocks",
        "tokens": tokens,
        "elapsed_s": time.perf_counter() - started,
        "peak_blocks": metrics.peak_blocks,
        "blocks_freed": metrics.blocks_freed,
    }


def run_alone(arguments: list[str], name: str) -> dict[str, Any]:
    """One setup in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--alone", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | ALLOCATOR)
    return {"name": name, **json.loads(done.stdout.splitlines()[-1])}


def draw(runs: list[dict[str, Any]], limit_mib: float, path: Path) -> None:
    """Memory of each process while its answer grows, and the line that it may not cross."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for run in (run for run in runs if run["samples"]):
        tokens, held = zip(*run["samples"], strict=True)
        (line,) = axis.plot(tokens, [(run["weight_bytes"] + b) / MIB for b in held], label=run["name"])
        if run["outcome"] != "done":
            axis.plot(tokens[-1], (run["weight_bytes"] + held[-1]) / MIB, "X", color=line.get_color())
    axis.axhline(limit_mib, color="black", linestyle="--", linewidth=1, label="what there is")
    axis.set(xlabel="tokens so far", ylabel="MiB of weights and blocks in use", ylim=(0, None))
    figure.legend(fontsize=8, loc="outside lower center", ncols=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=real_gguf(), help="a .gguf file, or packed weights")
    parser.add_argument("--tokens", type=int, default=32_768, help="prompt and answer")
    parser.add_argument("--budget", type=int, default=2048, help="tokens kept for each head")
    parser.add_argument("--form", default="bf16", help="KV format where the setup names none")
    parser.add_argument("--pool-share", type=float, default=0.9, help="of what is free behind the weights")
    parser.add_argument("--limit-mib", type=float, default=(0.92 * 24 * 1024 - 1144.4) / 64)
    parser.add_argument("--out", type=Path, default=Path("demo_out/24gb.png"), help="the chart")
    parser.add_argument("--json", type=Path, help="the figures")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=[*SETUPS])
    parser.add_argument("--alone", choices=SETUPS, help="this setup in this process, as JSON")
    given = parser.parse_args(arguments)
    if given.model is None:
        parser.error("no model with packed weights is here; run `kvreclaim fetch`, or pass --model.")
    if given.alone:
        print(json.dumps(run_limited(given, SETUPS[given.alone])))
        return
    runs = [run_alone(arguments, name) for name in given.setups]
    show(sheet(f"one answer of {given.tokens:,} tokens, {given.limit_mib:.0f} MiB", COLUMNS, runs))
    draw(runs, given.limit_mib, given.out)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"model": given.model.name, "runs": runs}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
