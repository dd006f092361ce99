"""Decode, peers and serving on a Llama of 8B parameters with random weights, which are made on the device."""

from __future__ import annotations

import gc
import importlib.util
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import DeviceType, ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from kvreclaim import LLM, CompressionConfig
from kvreclaim.bench.common import Row
from kvreclaim.bench.kernels import GRAPH_CALLS, captured, median_time
from kvreclaim.bench.step_times import Timed, replay
from kvreclaim.bench.systems.base import Point, SystemSetup
from kvreclaim.bench.systems.base import Session as Opened
from kvreclaim.bench.systems.hf import Generate
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.ops.triton import flash_trial
from kvreclaim.plan.lengths import read_lengths
from kvreclaim.sim.traces.drawn import Arrivals
from scripts.gpu.session import Session

HEADS = {"equal heads": "knorm", "unequal heads": "ada_kv(knorm)"}
WARM_UPS, MORE = 3, 8
"""Steps before those that are timed, and most steps beside them."""
FLASH_POINTS, PROFILED = 2, 32
"""Points of the grid that FlashAttention 3 is measured at; the batch of which kernels are listed."""
TOP, RATE = 8, 8.0
"""Kernels that are listed; requests a second."""
HERE = Path(__file__).parent
CONVERSATIONS = HERE / "conversations.csv"
"""Lengths of every 161st request of Azure's conversation trace of 2023 (AzurePublicDataset, CC-BY 4.0)."""


@contextmanager
def random_weights(session: Session) -> Iterator[SystemSetup]:
    """The model of every system. While it lasts, transformers makes its weights on the device at random
    instead of reading a file: 16 GB are neither written nor carried."""
    model = HERE / ("llama-tiny" if session.is_tiny else "llama-8b")

    def made(name: Any, *, dtype: Any, attn_implementation: str, config: Any = None, **more: Any) -> Any:
        config = config or AutoConfig.from_pretrained(name)
        options = {"dtype": dtype, "attn_implementation": attn_implementation}
        with torch.device(session.device):
            found = AutoModelForCausalLM.from_config(config, **options)
        return (found, {"missing_keys": ()}) if more.get("output_loading_info") else found

    with patch.object(AutoModelForCausalLM, "from_pretrained", made):
        yield SystemSetup(model, session.dtype, torch.get_num_threads())


def compression(session: Session, policy: str | None) -> CompressionConfig | None:
    """2,048 tokens and the other settings as they are by default."""
    if policy is None:
        return None
    options = {"budget": 32, "interval": 16, "recent": 8} if session.is_tiny else {"budget": 2048}
    return CompressionConfig(policy, **options)


def decode(session: Session) -> None:
    """Steps of a batch with random tokens in its cache, and the kernels of a step with each kind of cache.
    Then the full cache with FlashAttention 3, where it is installed."""
    points = grid(session.is_tiny)
    with random_weights(session) as setup:
        measure_steps(session, setup, points, "triton")
        if session.is_tiny or importlib.util.find_spec(flash_trial.MODULE):
            gc.collect()
            torch.cuda.empty_cache()
            measure_steps(
                session, setup, [each for each in points if each[0] == "full"][:FLASH_POINTS], "auto"
            )


def measure_steps(
    session: Session, setup: SystemSetup, points: list[tuple[str, Point]], kernels: str
) -> None:
    start = perf_counter()
    system = KvreclaimSystem("kvreclaim", setup, [point for _, point in points], kernels=kernels)
    elapsed_s, modules = perf_counter() - start, system.llm.loaded.modules
    session.add(label="load", elapsed_s=elapsed_s, modules=modules, kernels=system.llm.engine.kernels)
    for label, point in points:
        system.config = compression(session, HEADS.get(label))
        system.compressor = None if system.config is None else system.llm.compressor(system.config)
        name = label if kernels == "triton" else f"{label}, kernels={kernels}"
        about: Row = {"label": name, "context": point.context, "batch": point.batch}
        with session.trying(**about), closing(system.open(point)) as opened:
            steps = point.new_tokens - MORE
            session.add(**about, fill_s=opened.fill_s, **stepped(system, opened, steps))
            if point.batch == PROFILED or session.is_tiny:
                session.add(step=name, **profiled(session, lambda: opened.run(1)))


def grid(is_tiny: bool) -> list[tuple[str, Point]]:
    """Caches and points, in the order of what they show; with compression, steps of more than an interval."""
    if is_tiny:
        return [("full", Point(40, 2, 2 + MORE)), *((label, Point(40, 2, 12 + MORE)) for label in HEADS)]
    steps = {"full": 40, **dict.fromkeys(HEADS, 168)}
    first = [("full", 2112, 32), ("full", 32_768, 16)]
    first += [(label, *point) for point in ((32_768, 16), (2112, 32)) for label in HEADS]
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
        **{"ms_median": median(times), "ms_mean": mean(times), "ms_max": max(times)},
        "tokens_per_s": 1e3 * tokens / sum(times),
        "gb": num_bytes / 1e9,
        "gb_s": num_bytes / median(times) / 1e6,
        "passes": engine.totals.compactions - passes,
        "refusals": "no graphs" if graphs is None else dict(refused),
    }


def profiled(session: Session, work: Callable[[], object]) -> Row:
    """Kernels of one call: how many, their ms, and those that take most."""
    name = "cpu" if session.is_tiny else "device"
    with profile(activities=[ProfilerActivity.CPU if session.is_tiny else ProfilerActivity.CUDA]) as found:
        work()
    kind = DeviceType.CPU if session.is_tiny else DeviceType.CUDA
    events = [event for event in found.key_averages() if event.device_type == kind]
    times = [(getattr(event, f"self_{name}_time_total") / 1e3, event) for event in events]
    times.sort(key=lambda pair: -pair[0])
    return {
        "launches": sum(event.count for _, event in times),
        "device_ms": sum(ms for ms, _ in times),
        "most": "; ".join(f"`{event.key[:80]}` {event.count} x, {ms:.2f} ms" for ms, event in times[:TOP]),
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
    with random_weights(session) as setup, session.trying(peer=Generate.name):
        system = Generate(setup)
        for point in grid:
            about = {"peer": system.name, "context": point.context, "batch": point.batch}
            with session.trying(**about), closing(system.open(point)) as opened:
                opened.run(2)
                found = opened.run(steps)
                ms = 1e3 * found.elapsed_s / found.steps
                session.add(**about, ms=ms, tokens_per_s=found.tokens_per_s)


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
    num, prompt, output = (3, 24, 4) if session.is_tiny else (120, 8000, 1000)
    lengths, times = read_lengths(CONVERSATIONS, num), Arrivals(RATE).times(num)
    sizes = zip(lengths.prompts.clip(max=prompt), lengths.outputs.clip(max=output), strict=True)
    requests = [Timed(time, int(a), int(b)) for time, (a, b) in zip(times, sizes, strict=True)]
    warm_up = [replace(request, arrival_s=0.0, num_output=2) for request in requests[:8]]
    options = {"dtype": session.dtype, "device": session.device, "max_model_len": prompt + output}
    options |= {"num_blocks": 200 if session.is_tiny else int(60e9 / 16 / 131_072)}
    with random_weights(session) as setup:
        llm = LLM(setup.model, kernels="triton", enable_prefix_caching=False, **options)
    for policy in (None, HEADS["equal heads"]):
        with session.trying(label=policy or "full"), llm.compressed(compression(session, policy)):
            replay(llm, warm_up, random.Random(1))
            served = list(zip(requests, replay(llm, requests, random.Random(0)), strict=True))
            ttft = [ours.first_token_s - request.arrival_s for request, ours in served]
            tpot = [
                (ours.end_s - ours.first_token_s) / max(1, request.num_output - 1) for request, ours in served
            ]
            speed = sum(request.num_output for request, _ in served) / max(ours.end_s for _, ours in served)
            found = {f"ttft_ms_p{p}": 1e3 * float(np.percentile(ttft, p)) for p in (50, 99)}
            found |= {f"tpot_ms_p{p}": 1e3 * float(np.percentile(tpot, p)) for p in (50, 99)}
            session.add(label=policy or "full", num=num, rate=RATE, tokens_per_s=speed, **found)
