"""Throughput through HTTP beside the same engine's without it, and time to first token under load."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic, sleep

import numpy as np
from rich.table import Table

from kvreclaim.bench.common import Columns, Row, alternate, seconds, sheet, spread
from kvreclaim.bench.plans import ServePlan
from kvreclaim.bench.serve_client import Ask, StreamedAnswer, ask_all
from kvreclaim.checks import require
from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import InvalidArgumentError, KVReclaimError
from kvreclaim.sampling_params import SamplingParams

NAME = "measured"
START_S = 300.0
"""A server that is not up by then will not come up."""


class DifferentAnswersError(KVReclaimError):
    """HTTP gave another text than the engine alone: nothing is measured."""


def run(plan: ServePlan) -> list[Row]:
    """Both at every number of streams, in turns; prefix caching is off on both sides. Before, every answer
    is found equal in float32.

    Returns: rows with `offline` and `http` tokens/s (medians), `ratio`, the median of the rounds' own
    (`ratios`, sorted: where a machine is faster for a while it is so for both), `ttft_p50_ms` and
    `ttft_p99_ms` over all streams of all rounds, and `itl_p50_ms`, `itl_p99_ms` between two pieces of a
    stream, over all of them; `other_answers` of those in plan.dtype before measuring. Raises:
    DifferentAnswersError.
    """
    exact = replace(plan, dtype="float32")
    if plan != exact:  # in others rounding depends on who shares a step: near-ties fall either way
        with serving(exact) as base_url:
            _verify(exact, _engine(exact), base_url)
    llm = _engine(plan)
    with serving(plan) as base_url:
        others = _verify(plan, llm, base_url, strict=plan == exact)
        rows = [
            _measure(plan, llm, base_url, num_streams) | {"other_answers": others[num_streams]}
            for num_streams in plan.streams
        ]
        if plan.arrivals:
            rows.append(_under_load(plan, llm, base_url, rows[-1]["offline"]))
    return rows


def _engine(plan: ServePlan) -> LLM:
    return LLM(
        plan.model,
        dtype=plan.dtype,
        num_blocks=plan.num_blocks,
        max_num_seqs=max(plan.streams),
        enable_prefix_caching=False,
        compression=plan.policy(plan.compress),
        spread_compression=plan.spread_compression,
    )


@contextmanager
def serving(plan: ServePlan) -> Iterator[str]:
    """`kvreclaim serve` in a process of its own. Gives: its address."""
    program = "from kvreclaim.cli.main import app; app()"
    options = {
        "model": plan.model,
        "served-model-name": NAME,
        "port": 0,
        "dtype": plan.dtype,
        "num-gpu-blocks-override": plan.num_blocks,
        "max-num-seqs": max(plan.streams),
        "log-format": "text",
    }
    if (compression := plan.policy(plan.compress)) is not None:
        options |= {
            "kv-compression": compression.policy,
            "kv-budget": compression.budget,
            "kv-compression-interval": compression.interval,
            "kv-recent": compression.recent,
        }
    command = [sys.executable, "-c", program, "serve", "--no-enable-prefix-caching"]
    command += [] if plan.spread_compression else ["--no-spread-compression"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command += [] if plan.engine_process else ["--no-engine-process"]
    with tempfile.NamedTemporaryFile() as log:
        environment = os.environ | {"OMP_NUM_THREADS": str(plan.threads)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield _address(process, Path(log.name))
        finally:
            process.terminate()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = monotonic() + START_S
    while process.poll() is None and monotonic() < deadline:
        if found := re.search(r"at (http://\S+)", log.read_text(encoding="utf-8")):
            return found[1]
        sleep(0.05)
    said = log.read_text(encoding="utf-8")[-2000:]
    raise InvalidArgumentError(f"the server did not start; it said: {said}")


def _asks(plan: ServePlan, llm: LLM, count: int, seed: int) -> list[Ask]:
    rng = random.Random(seed)
    size = llm.tokenizer.vocab_size
    return [
        Ask([rng.randrange(5, size) for _ in range(plan.num_prompt)], plan.num_output) for _ in range(count)
    ]


def _offline(llm: LLM, asks: list[Ask]) -> list[str]:
    params = [SamplingParams(temperature=0.0, max_tokens=ask.num_tokens, ignore_eos=True) for ask in asks]
    return [output.outputs[0].text for output in llm.generate([ask.prompt for ask in asks], params)]


def _http(base_url: str, asks: list[Ask]) -> tuple[list[StreamedAnswer], float]:
    return asyncio.run(ask_all(base_url, NAME, asks))


def _verify(plan: ServePlan, llm: LLM, base_url: str, *, strict: bool = True) -> dict[int, int]:
    """Also warms both up. Returns: answers that differ, by number of streams. Raises: DifferentAnswersError
    for the first one, if strict."""
    others = {}
    for num_streams in plan.streams:
        asks = _asks(plan, llm, num_streams, seed=-1)
        expected, told = _offline(llm, asks), _http(base_url, asks)[0]
        wrong = [i for i, answer in enumerate(told) if answer.text != expected[i]]
        others[num_streams] = len(wrong)
        if wrong and strict:
            raise DifferentAnswersError(
                f"{len(wrong)} of {num_streams} answers in {plan.dtype} differ from the engine's own, the "
                f"first is stream {wrong[0]}; nothing was measured."
            )
    return others


def _measure(plan: ServePlan, llm: LLM, base_url: str, num_streams: int) -> Row:
    answers: list[StreamedAnswer] = []
    rounds = [_asks(plan, llm, num_streams, seed=plan.seed + turn + 1) for turn in range(plan.rounds)]
    given = {"offline": iter(rounds), "http": iter(rounds)}

    def offline() -> float:
        asks = next(given["offline"])
        return seconds(lambda: _offline(llm, asks))

    def http() -> float:
        told, elapsed_s = _http(base_url, next(given["http"]))
        answers.extend(told)
        return elapsed_s

    elapsed = alternate({"offline": offline, "http": http}, plan.rounds)
    num_tokens = num_streams * plan.num_output
    row: Row = {"streams": num_streams, "num_prompt": plan.num_prompt, "num_output": plan.num_output}
    for name, values in elapsed.items():
        row |= {name: num_tokens / median(values), f"{name}_spread": spread(values)}
    pairs = [alone / served for alone, served in zip(elapsed["offline"], elapsed["http"], strict=True)]
    return (
        row | {"ratio": median(pairs), "ratios": sorted(pairs), "threads": plan.threads} | _latency(answers)
    )


def _latency(answers: list[StreamedAnswer]) -> Row:
    """Percentiles of the time to the first piece and between two pieces."""
    waits_s = {
        "ttft": [answer.first_s for answer in answers],
        "itl": [gap for answer in answers for gap in answer.gaps_s],
    }
    row: Row = {"num_ttft": len(answers)}
    for name, values in waits_s.items():
        p50, p99 = np.percentile(np.array(values) * 1e3, [50, 99])
        row |= {f"{name}_p50_ms": float(p50), f"{name}_p99_ms": float(p99)}
    return row


def _under_load(plan: ServePlan, llm: LLM, base_url: str, tokens_per_s: float) -> Row:
    """Requests that come when they come (Poisson), with the lengths of the trace if there is one."""
    lengths = _lengths(plan)
    rng = random.Random(plan.seed)
    mean_output = sum(output for _, output in lengths) / len(lengths)
    rate = plan.load * tokens_per_s / mean_output
    at_s, asks = 0.0, []
    for num_prompt, num_output in lengths:
        prompt = [rng.randrange(5, llm.tokenizer.vocab_size) for _ in range(num_prompt)]
        asks.append(Ask(prompt, num_output, at_s))
        at_s += rng.expovariate(rate)
    told, elapsed_s = _http(base_url, asks)
    total = sum(output for _, output in lengths)
    facts = {"arrivals": len(asks), "requests_per_s": rate, "load": plan.load, "http": total / elapsed_s}
    return facts | {"trace": plan.trace.name if plan.trace else None} | _latency(told)


def _lengths(plan: ServePlan) -> list[tuple[int, int]]:
    """(prompt, output) tokens of each arrival; a trace's are scaled, so that a small model serves them."""
    if plan.trace is None:
        return [(plan.num_prompt, plan.num_output)] * plan.arrivals
    header, *lines = plan.trace.read_text(encoding="utf-8").splitlines()
    if header.split(",")[1:] != ["ContextTokens", "GeneratedTokens"]:
        raise InvalidArgumentError(
            f"{plan.trace} begins with {header[:60]!r}; pass a CSV file with the columns TIMESTAMP, "
            "ContextTokens, GeneratedTokens."
        )
    require(
        len(lines) >= plan.arrivals,
        f"{plan.trace} has {len(lines)} requests, but --arrivals is {plan.arrivals}; lower it.",
    )
    rows = [line.split(",")[1:] for line in lines[: plan.arrivals]]
    return [(max(1, round(int(a) * plan.scale)), max(1, round(int(b) * plan.scale))) for a, b in rows]


def serve_table(rows: list[Row]) -> Table:
    """For people."""

    def what(row: Row) -> str:
        return str(row["streams"]) if "streams" in row else f"{row['requests_per_s']:.2f} requests/s arrive"

    columns: Columns = {
        "streams": what,
        "offline tok/s": "{offline:,.0f}",
        "HTTP tok/s": "{http:,.0f}",
        "ratio": "{ratio:.3f}",
        "first token p50 ms": "{ttft_p50_ms:,.1f}",
        "first token p99 ms": "{ttft_p99_ms:,.1f}",
        "between tokens p50 ms": "{itl_p50_ms:,.1f}",
        "between tokens p99 ms": "{itl_p99_ms:,.1f}",
    }
    return sheet("HTTP against the engine alone", columns, rows)
