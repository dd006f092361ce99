"""Requests for an engine: a continuous random load, or requests at given times."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, sleep

from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.request import Request
from kvreclaim.sampling_params import SamplingParams

TURN = 24
"""Requests that end before the concurrency is drawn anew."""
IDLE_S = 0.0002


@dataclass(frozen=True, slots=True)
class Timed:
    """A request: seconds from the beginning, tokens."""

    arrival_s: float
    num_prompt: int
    num_output: int


@dataclass(slots=True)
class ServedRequest:
    """Times of one request, in seconds since the start."""

    first_token_s: float
    end_s: float


def draw(rng: random.Random, low: int, high: int) -> int:
    """Draw log-uniformly: equally many short and long ones."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def keep_busy(llm: LLM, seconds: float, *, longest: int, rng: random.Random) -> None:
    """Serve random requests for this time, at changing concurrency; prompts and answers up to `longest`
    tokens. Remaining requests are aborted."""
    engine, most = llm.engine, llm.engine.config.max_num_seqs
    number, ended, at_once = 0, 0, most
    until = perf_counter() + seconds
    while perf_counter() < until:
        while len(engine.requests) < at_once:
            _add(llm, number, _prompt(llm, draw(rng, 8, longest), rng), draw(rng, 8, longest))
            number += 1
        ended += sum(request.finished for request in engine.step().requests)
        if ended >= TURN:
            ended, at_once = 0, draw(rng, 1, most)
    for request_id in list(engine.requests):
        engine.abort(request_id)


def replay(llm: LLM, requests: Sequence[Timed], rng: random.Random) -> list[ServedRequest]:
    """Serve requests that arrive at their times, in order, in real time."""
    engine = llm.engine
    prompts = [_prompt(llm, timed.num_prompt, rng) for timed in requests]
    coming = list(enumerate(requests))[::-1]
    began = perf_counter()
    first: dict[str, float] = {}
    end: dict[str, float] = {}
    while coming or engine.has_unfinished:
        while coming and coming[-1][1].arrival_s <= perf_counter() - began:
            number, timed = coming.pop()
            _add(llm, number, prompts[number], timed.num_output)
        if not engine.has_unfinished:
            sleep(IDLE_S)
            continue
        touched = engine.step().requests
        now = perf_counter() - began
        for request in touched:
            _note(request, now, first, end)
    return [ServedRequest(first[str(number)], end[str(number)]) for number in range(len(requests))]


def _note(request: Request, now: float, first: dict[str, float], end: dict[str, float]) -> None:
    if request.sequences and request.sequences[0].num_generated:
        first.setdefault(request.request_id, now)
    if request.finished:
        end[request.request_id] = now


def _prompt(llm: LLM, num_tokens: int, rng: random.Random) -> list[int]:
    size = llm.loaded.model.config.get_text_config().vocab_size
    return [rng.randrange(5, size) for _ in range(num_tokens)]


def _add(llm: LLM, number: int, prompt: list[int], num_output: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    compressor = None if llm.compression is None else llm.compressor(llm.compression)
    llm.engine.add_request(str(number), prompt, params, compressor)
