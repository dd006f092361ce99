"""Decode, peers and serving on a Llama of 8B parameters whose weights are random and made on the device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import DeviceType, ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.bench.common import Row
from kvreclaim.bench.kernels import GRAPH_CALLS, captured, median_time
from kvreclaim.bench.systems.base import Point, SystemSetup, random_prompts
from kvreclaim.bench.systems.base import Session as Opened
from kvreclaim.bench.systems.hf import ContinuousBatching, Generate
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.engine.request.request import Request
from kvreclaim.plan.lengths import read_lengths
from kvreclaim.sim.traces.drawn import Arrivals
from scripts.gpu.session import Session

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}
HEADS = {"equal heads": "knorm", "unequal heads": "ada_kv(knorm)"}
WARM_UPS, MORE, TOP = 3, 8, 12
"""Steps before those that are timed, steps beyond the timed ones at most, kernels that are listed."""
CONVERSATIONS = Path(__file__).parent / "conversations.csv"
"""Lengths of every 64th request of Azure's conversation trace of 2023 (AzurePublicDataset, CC-BY 4.0)."""
DRAIN_S = 10.0


@contextmanager
def random_weights(session: Session) -> Iterator[SystemSetup]:
    """The model's directory. While it lasts, transformers makes random weights on the device instead of
    reading a file: 16 GB are neither written nor carried."""
    config = json.dumps(LLAMA_8B | (TINY if session.is_tiny else {}))

    def made(name: Any, *, dtype: Any, attn_implementation: str, config: Any = None, **more: Any) -> Any:
        config = AutoConfig.from_pretrained(name) if config is None else config
        with torch.device(session.device):
            found = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation
            )
        return (found, {"missing_keys": ()}) if more.get("output_loading_info") else found

    with (
        TemporaryDirectory() as directory,
        patch.object(AutoModelForCausalLM, "from_pretrained", made),
    ):
        model = Path(directory)
        (model / "config.json").write_text(config, encoding="utf-8")
        yield SystemSetup(model, session.dtype, torch.get_num_threads())


def compression(session: Session, policy: str | None) -> CompressionConfig | None:
    """2,048 tokens and the other settings as they are by default."""
    if policy is None:
        return None
    options = {"budget": 32, "interval": 16, "recent": 8} if session.is_tiny else {"budget": 2048}
    return CompressionConfig(policy, **options)


def decode(session: Session) -> None:
    """Steps of a batch whose cache holds random tokens, and the kernels of a step with each kind of cache."""
    points = grid(session.is_tiny)
    with random_weights(session) as setup:
        start = perf_counter()
        system = KvreclaimSystem("kvreclaim", setup, [point for _, point in points], kernels="triton")
        session.add(label="load", elapsed_s=perf_counter() - start, modules=system.llm.loaded.modules)
        seen: set[str] = set()
        for label, point in points:
            system.config = compression(session, HEADS.get(label))
            system.compressor = None if system.config is None else system.llm.compressor(system.config)
            about: Row = {"label": label, "context": point.context, "batch": point.batch}
            with session.trying(**about), closing(system.open(point)) as opened:
                steps = point.new_tokens - MORE
                session.add(**about, fill_s=opened.fill_s, **stepped(system, opened, steps))
                if label not in seen:
                    session.add(label=f"{label}, profile", **profiled(session, lambda: opened.run(1)))
                    seen.add(label)


def grid(is_tiny: bool) -> list[tuple[str, Point]]:
    """Caches and points, in the order of what they show; with compression, steps of more than an interval."""
    if is_tiny:
        return [("full", Point(40, 2, 2 + MORE)), *((label, Point(40, 2, 12 + MORE)) for label in HEADS)]
    steps = {"full": 40, **dict.fromkeys(HEADS, 168)}
    first = [("full", 2112, 32), ("full", 32_768, 16), *((label, 2112, 32) for label in HEADS)]
    others = [(label, 2112, batch) for batch in (8, 64) for label in steps]
    others += [("full", 32_768, batch) for batch in (8, 22)]
    return [(label, Point(*point, steps[label] + MORE)) for label, *point in first + others]


def stepped(system: KvreclaimSystem, opened: Opened, steps: int) -> Row:
    """ms of each step, tokens/s, bytes that a step must read: weights, keys and values."""
    engine, graphs = system.llm.engine, system.llm.engine.runner.graphs
    opened.run(WARM_UPS)
    refused = Counter(None if graphs is None else graphs.refusals)
    passes = engine.totals.compactions
    times, blocks, tokens = [], [], 0
    for _ in range(steps):
        piece = opened.run(1)
        times.append(1e3 * piece.elapsed_s)
        tokens += piece.tokens
        blocks.append(engine.memory.stats().in_use)
    loaded = system.llm.loaded
    unread = loaded.model.get_input_embeddings().weight.nbytes  # but for a row of each sequence
    num_bytes = loaded.weight_bytes - unread + mean(blocks) * engine.cache.bytes_per_block
    refused = Counter() if graphs is None else Counter(graphs.refusals) - refused
    return {
        "ms_median": median(times),
        "ms_mean": mean(times),
        "ms_max": max(times),
        "tokens_per_s": 1e3 * tokens / sum(times),
        "gb": num_bytes / 1e9,
        "gb_s": num_bytes / median(times) / 1e6,
        "passes": engine.totals.compactions - passes,
        "refusals": "no graphs" if graphs is None else dict(refused),
    }


def profiled(session: Session, work: Callable[[], object]) -> Row:
    """Kernels of one call: how many, their ms, and those that take most."""
    activity, kind, time = ProfilerActivity.CUDA, DeviceType.CUDA, "self_device_time_total"
    if session.is_tiny:
        activity, kind, time = ProfilerActivity.CPU, DeviceType.CPU, "self_cpu_time_total"
    with profile(activities=[activity]) as found:
        work()
        if not session.is_tiny:
            torch.cuda.synchronize()
    events = [each for each in found.key_averages() if each.device_type == kind and getattr(each, time) > 0]
    events.sort(key=lambda each: -getattr(each, time))
    return {
        "launches": sum(each.count for each in events),
        "device_ms": sum(getattr(each, time) for each in events) / 1e3,
        "top": [[each.key[:80], each.count, getattr(each, time) / 1e3] for each in events[:TOP]],
    }


def peers(session: Session) -> None:
    """torch's attention over contiguous keys and values, then transformers on the model."""
    is_tiny, device, dtype = session.is_tiny, session.device, getattr(torch, session.dtype)
    heads, dim = (2, 16) if is_tiny else (8, 128)
    for context, n in ((64, 2),) if is_tiny else ((2112, 32), (32_768, 16), (32_768, 1)):
        about: Row = {"peer": "torch SDPA, enable_gqa", "context": context, "batch": n}
        with session.trying(**about), torch.inference_mode():
            q = torch.randn(n, 4 * heads, 1, dim, device=device, dtype=dtype)
            k, v = torch.randn(2, n, heads, context, dim, device=device, dtype=dtype)
            us = 1e6 * attention_s(q, k, v)
            session.add(**about, us=us, gb_s=2 * k.nbytes / us / 1e3)
            del q, k, v
    steps = 4 if is_tiny else 24
    grid = [Point(*point, 4 * steps) for point in (((40, 2),) if is_tiny else ((2112, 32), (32_768, 8)))]
    computed = [replace(grid[0], fill="prefill")]  # graphs pad its steps, so that fills cannot be told apart
    with random_weights(session) as setup:
        for kind, points in ((Generate, grid), (ContinuousBatching, computed)):
            with session.trying(peer=kind.name):
                system = kind(setup)
                for point in points:
                    about = {"peer": kind.name, "context": point.context, "batch": point.batch}
                    with session.trying(**about), closing(system.open(point)) as opened:
                        opened.run(2)
                        found = opened.run(steps)
                        ms = 1e3 * found.elapsed_s / found.steps
                        session.add(**about, ms=ms, tokens_per_s=found.tokens_per_s)
                del system


def attention_s(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Seconds of a call, median of a graph's."""

    def attend() -> None:
        for _ in range(GRAPH_CALLS):
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    attend()
    work = captured(attend)[0] if q.is_cuda else attend
    return median_time(work, q.device.type) / GRAPH_CALLS


def serve(session: Session) -> None:
    """Requests with the lengths of conversations at random times, without and with compression."""
    most, rate, num = ((24, 4), 8.0, 3) if session.is_tiny else ((8000, 1000), 8.0, 144)
    lengths = read_lengths(CONVERSATIONS, num)
    sizes = [
        (min(prompt, most[0]), min(output, most[1]))
        for prompt, output in zip(lengths.prompts.tolist(), lengths.outputs.tolist(), strict=True)
    ]
    budget = compression(session, HEADS["equal heads"])
    pool = 200 if session.is_tiny else int(60e9 / 16 / 131_072)
    options = {"num_blocks": pool, "max_model_len": sum(most), "enable_prefix_caching": False}
    with random_weights(session) as setup:
        llm = LLM(setup.model, dtype=session.dtype, device=session.device, kernels="triton", **options)
    for label, config in (("full", None), (budget.in_words, budget)):
        with session.trying(label=label):
            open_loop(llm, config, [(prompt, 2) for prompt, _ in sizes[:8]], 100.0)  # compiles what it needs
            session.add(label=label, rate=rate, **open_loop(llm, config, sizes, rate))


def open_loop(
    llm: LLM, config: CompressionConfig | None, sizes: Sequence[tuple[int, int]], rate: float
) -> Row:
    """Add each request at its time, whatever the engine does; stop DRAIN_S after the last. Times in seconds
    from when a request was due, of those that ended."""
    engine, vocab_size = llm.engine, llm.loaded.vocab_size
    compressor = None if config is None else llm.compressor(config)
    prompts = [random_prompts(1, prompt, vocab_size, i)[0] for i, (prompt, _) in enumerate(sizes)]
    due = Arrivals(rate).times(len(sizes))
    added: list[Request] = []
    start = perf_counter()
    while (now := perf_counter() - start) < due[-1] + DRAIN_S:
        while len(added) < len(due) and due[len(added)] <= now:
            i = len(added)
            params = SamplingParams(temperature=0.0, max_tokens=sizes[i][1], ignore_eos=True)
            added.append(engine.add_request(f"serve-{i}", prompts[i], params, compressor))
        if engine.has_unfinished:
            engine.step()
        elif len(added) == len(due):
            break
        else:
            sleep(max(0.0, due[len(added)] - now))
    elapsed_s = perf_counter() - start
    ended = [(i, request) for i, request in enumerate(added) if request.finished and request.error is None]
    for request in added:
        if not request.finished:
            engine.abort(request.request_id)
    if wrong := [request.error for request in added if request.error is not None]:
        raise RuntimeError(f"{len(wrong)} of {len(added)} requests failed: {wrong[0]}")
    late = {i: request.arrival_s - start - due[i] for i, request in ended}
    ttft = [request.metrics.ttft_s + late[i] for i, request in ended]
    spans = [(request.metrics, sizes[i][1] - 1) for i, request in ended if sizes[i][1] > 1]
    tpot = [(found.e2e_s - found.ttft_s) / steps for found, steps in spans]
    return {
        "offered": len(added),
        "ended": len(ended),
        "tokens_per_s": sum(request.metrics.num_generated_tokens for request in added) / elapsed_s,
        **percentiles("ttft_ms", ttft),
        **percentiles("tpot_ms", tpot),
    }


def percentiles(name: str, values_s: Sequence[float]) -> Row:
    return {f"{name}_p{p}": 1e3 * float(np.percentile(values_s, p)) for p in (50, 99)}
