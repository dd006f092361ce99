"""Throughput through HTTP compared with the engine alone and with other servers, and time to first token
under load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np
from rich.table import Table

from kvreclaim.bench.common import Columns, Row, alternate, seconds, sheet, spread
from kvreclaim.bench.plans import LLAMACPP, ServePlan
from kvreclaim.bench.serve_client import StreamedAnswer, TimedPrompt, send_all
from kvreclaim.bench.systems.base import SkipPoint, random_prompts
from kvreclaim.bench.systems.server_process import NAME, KvreclaimServer, LlamaCppServer, ServerProcess
from kvreclaim.bench.verify import PackedReferee, TokenAgreement, require_agreement
from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import InvalidArgumentError, KVReclaimError
from kvreclaim.sampling_params import SamplingParams

Server = TypeVar("Server", bound=ServerProcess)
OURS = "kvreclaim"
JUDGED = (8, 96, 24)
"""Prompts, and the most tokens of each and of its answer, for the check of greedy tokens."""


class DifferentAnswersError(KVReclaimError):
    """HTTP gave another text than the engine alone: nothing is measured."""


def run(plan: ServePlan) -> tuple[list[Row], list[TokenAgreement]]:
    """Measure all sides at every number of streams, alternating, with prefix caching off. Before, our answers
    must be equal in float32, and peers must draw tokens of the same model.

    Returns: rows, one a system: ours with `offline` and `http` tokens/s (medians), `ratio`, the median of the
    rounds' own (`ratio_of_rounds`, sorted: drifts of the machine affect both), and `other_answers` in
    plan.dtype before measuring; a peer's with `http` and `times`, how many times as fast ours is, likewise;
    all with `ttft_p50_ms` and `ttft_p99_ms` over all streams of all rounds, and `itl_p50_ms`, `itl_p99_ms`
    between two pieces of a stream. And the judge's checks, if there are peers.
    Raises: DifferentAnswersError, WrongTokensError.
    """
    exact = replace(plan, dtype="float32")
    if plan != exact:  # in other dtypes rounding depends on the batch: near-ties fall either way
        with _serving(KvreclaimServer(exact)) as server:
            _verify(exact, _engine(exact), server.url)
    with ExitStack() as stack:
        peers = {name: stack.enter_context(_serving(_peer(plan, name))) for name in plan.peers}
        llm = _engine(plan)
        checks = _judge(plan, llm, peers) if peers else []
        ours = stack.enter_context(_serving(KvreclaimServer(plan)))
        others = _verify(plan, llm, ours.url, strict=plan == exact)
        urls = {OURS: ours.url} | {name: peer.url for name, peer in peers.items()}
        rows = []
        for num_streams in plan.streams:
            first, *more = _measure(plan, llm, urls, num_streams)
            rows += [first | {"other_answers": others[num_streams]}, *more]
        if plan.arrivals:
            rows += _under_load(plan, llm, urls, first["offline"])
    return rows, checks


@contextmanager
def _serving(server: Server) -> Iterator[Server]:
    """Yield a healthy server. Raises: InvalidArgumentError if it does not become healthy."""
    with closing(server):
        try:
            server.wait()
        except SkipPoint as error:
            raise InvalidArgumentError(f"{error}.") from error
        yield server


def _engine(plan: ServePlan) -> LLM:
    return LLM(
        plan.model,
        dtype=plan.dtype,
        num_blocks=plan.num_blocks,
        max_num_seqs=max(plan.streams),
        enable_prefix_caching=False,
        compression=plan.policy(plan.compress),
        spread_compression=plan.spread_compression,
        quantized_activations=plan.activations,
    )


def _peer(plan: ServePlan, name: str) -> LlamaCppServer:
    return LlamaCppServer(
        plan.llamacpp_python.with_name("llama-server"),
        plan.model,
        threads=plan.threads,
        cache_type=LLAMACPP[name],
        sequences=max(plan.streams),
        max_len=plan.num_prompt + plan.num_output,
    )


def _judge(plan: ServePlan, llm: LLM, peers: dict[str, LlamaCppServer]) -> list[TokenAgreement]:
    """Greedy tokens of our engine and of every peer. Raises: WrongTokensError."""
    count, num_prompt, num_tokens = JUDGED
    prompts = random_prompts(count, min(num_prompt, plan.num_prompt), llm.tokenizer.vocab_size, seed=7)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    drawn = {OURS: [output.outputs[0].token_ids for output in llm.generate(prompts, params)]}
    drawn |= {name: peer.generate(prompts, num_tokens) for name, peer in peers.items()}
    judge, checks = PackedReferee(plan.model), []
    for name, answers in drawn.items():
        answered_at = [i for i, answer in enumerate(answers) if answer]  # a peer may end at once
        given, answered = [prompts[i] for i in answered_at], [answers[i] for i in answered_at]
        checks.append(judge.judge(name, plan.dtype, given, answered))
    require_agreement(checks)
    return checks


def _load(plan: ServePlan, llm: LLM, count: int, seed: int) -> list[TimedPrompt]:
    rng = random.Random(seed)
    size = llm.tokenizer.vocab_size
    return [
        TimedPrompt([rng.randrange(5, size) for _ in range(plan.num_prompt)], plan.num_output)
        for _ in range(count)
    ]


def _offline(llm: LLM, load: list[TimedPrompt]) -> list[str]:
    params = [SamplingParams(temperature=0.0, max_tokens=item.num_tokens, ignore_eos=True) for item in load]
    return [output.outputs[0].text for output in llm.generate([item.prompt for item in load], params)]


def _http(base_url: str, load: list[TimedPrompt]) -> tuple[list[StreamedAnswer], float]:
    return asyncio.run(send_all(base_url, NAME, load))


def _verify(plan: ServePlan, llm: LLM, base_url: str, *, strict: bool = True) -> dict[int, int]:
    """Compare HTTP with the engine; also warms both up. Returns: differing answers by number of streams.
    Raises: DifferentAnswersError for the first one, if strict."""
    others = {}
    for num_streams in plan.streams:
        load = _load(plan, llm, num_streams, seed=-1)
        expected, streamed = _offline(llm, load), _http(base_url, load)[0]
        wrong = [i for i, answer in enumerate(streamed) if answer.text != expected[i]]
        others[num_streams] = len(wrong)
        if wrong and strict:
            raise DifferentAnswersError(
                f"{len(wrong)} of {num_streams} answers in {plan.dtype} differ from the engine's own, the "
                f"first is stream {wrong[0]}; nothing was measured."
            )
    return others


def _measure(plan: ServePlan, llm: LLM, urls: dict[str, str], num_streams: int) -> list[Row]:
    """The row of each server, ours first."""
    answers: dict[str, list[StreamedAnswer]] = {name: [] for name in urls}
    rounds = [_load(plan, llm, num_streams, seed=plan.seed + turn + 1) for turn in range(plan.rounds)]

    def offline(given: Iterator[list[TimedPrompt]]) -> float:
        load = next(given)
        return seconds(lambda: _offline(llm, load))

    def http(name: str, given: Iterator[list[TimedPrompt]]) -> float:
        streamed, elapsed_s = _http(urls[name], next(given))
        answers[name].extend(streamed)
        return elapsed_s

    runs = {"offline": partial(offline, iter(rounds))}
    runs |= {name: partial(http, name, iter(rounds)) for name in urls}
    elapsed_s = alternate(runs, plan.rounds)
    rows = [
        _speeds(num_streams * plan.num_output, {"http": elapsed_s[name]})
        | {"system": name, "streams": num_streams, "threads": plan.threads}
        | {"num_prompt": plan.num_prompt, "num_output": plan.num_output}
        | _latency(answers[name])
        for name in urls
    ]
    rows[0] |= _speeds(num_streams * plan.num_output, {"offline": elapsed_s["offline"]})
    rows[0] |= _ratios("ratio", elapsed_s["offline"], elapsed_s[OURS])
    for row in rows[1:]:
        row |= _ratios("times", elapsed_s[row["system"]], elapsed_s[OURS])
    return rows


def _speeds(num_tokens: int, elapsed_s: dict[str, list[float]]) -> Row:
    row: Row = {}
    for name, values in elapsed_s.items():
        row |= {name: num_tokens / median(values), f"{name}_spread": spread(values)}
    return row


def _ratios(name: str, slower_s: list[float], faster_s: list[float]) -> Row:
    """Ratio of the second to the first: the median of the rounds' own, and these."""
    pairs = [slow / fast for slow, fast in zip(slower_s, faster_s, strict=True)]
    return {name: median(pairs), f"{name}_of_rounds": sorted(pairs)}


def _latency(answers: list[StreamedAnswer]) -> Row:
    """Percentiles of the time to the first piece and between two pieces."""
    waits_s = {
        "ttft": [answer.first_s for answer in answers],
        "itl": [gap for answer in answers for gap in answer.gaps_s],
    }
    row: Row = {"num_ttft": len(answers)}
    for name, values in waits_s.items():
        if not values:
            continue
        p50, p99 = np.percentile(np.array(values) * 1e3, [50, 99])
        row |= {f"{name}_p50_ms": float(p50), f"{name}_p99_ms": float(p99)}
    return row


def _under_load(plan: ServePlan, llm: LLM, urls: dict[str, str], tokens_per_s: float) -> list[Row]:
    """Send Poisson arrivals, the same to every server."""
    rng = random.Random(plan.seed)
    rate = plan.load * tokens_per_s / plan.num_output
    at_s, load = 0.0, []
    for _ in range(plan.arrivals):
        prompt = [rng.randrange(5, llm.tokenizer.vocab_size) for _ in range(plan.num_prompt)]
        load.append(TimedPrompt(prompt, plan.num_output, at_s))
        at_s += rng.expovariate(rate)
    facts: Row = {"arrivals": len(load), "requests_per_s": rate, "load": plan.load}
    rows = []
    for name, url in urls.items():
        streamed, elapsed_s = _http(url, load)
        rows.append(
            {
                "system": name,
                **facts,
                "http": plan.arrivals * plan.num_output / elapsed_s,
                **_latency(streamed),
            }
        )
    return rows


def serve_table(rows: list[Row]) -> Table:
    def what(row: Row) -> str:
        return str(row["streams"]) if "streams" in row else f"{row['requests_per_s']:.2f} requests/s arrive"

    columns: Columns = {
        "streams": what,
        "system": "{system}",
        "offline tok/s": "{offline:,.0f}",
        "HTTP tok/s": "{http:,.0f}",
        "of offline": "{ratio:.3f}",
        "ours is x": "{times:.2f}",
        "first token p50 ms": "{ttft_p50_ms:,.1f}",
        "first token p99 ms": "{ttft_p99_ms:,.1f}",
        "between tokens p50 ms": "{itl_p50_ms:,.1f}",
        "between tokens p99 ms": "{itl_p99_ms:,.1f}",
    }
    return sheet("HTTP and the engine alone", columns, rows, text_columns=2)
