"""The conversations of turns.py inside vLLM: its full cache, compression, and compression with snapshots.

    python -m benchmarks vllm_turns --model DIR --text FILE --budget 2048

PLACES tokens of an answer are a request each behind those before them (teacher forcing), so that every
setting sees the same tokens. `computed` is of a turn's first request, whose prompt has all that is new.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from time import perf_counter

from benchmarks.runner import case
from benchmarks.turns import (
    COLUMNS,
    COMPRESSED,
    FULL,
    SNAPSHOTS,
    TurnsPlan,
    by_setting,
    num_shared,
    sessions_of,
)
from kvreclaim.bench.common import Row
from kvreclaim.bench.plans import OWN_VLLM
from kvreclaim.bench.systems.server_process import NAME, VLLM_BLOCK_SIZE, Gauges, VllmServer
from kvreclaim.bench.systems.worker_process import compression_option, link_model
from kvreclaim.bench.vllm_plugin import RUNNING, USAGE
from kvreclaim.checks import require
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.task import Item
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.options import option

PLACES = 8
"""Of an answer, evenly spaced: where the likeliest token is compared."""


@dataclass(frozen=True, kw_only=True)
class VllmTurnsPlan(TurnsPlan):
    """Sessions, each under every setting, in servers of vLLM."""

    vllm_python: Path = option(OWN_VLLM, "Interpreter of vLLM's environment (`make vllm-env`).")
    num_blocks: int = option(
        0, "Blocks of the pool where a policy compresses; 0: as many as a session has.", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        others = set(self.settings) - {FULL, COMPRESSED, SNAPSHOTS}
        require(
            not others,
            f"--settings has {', '.join(sorted(others))}, which vLLM lacks; name some of "
            f"{FULL}, {COMPRESSED} and {SNAPSHOTS}.",
        )
        require(
            self.vllm_python.is_file(),
            f"--vllm-python is {str(self.vllm_python)!r}, which is no file; run `make vllm-env`.",
        )


@case("turns behind the first, in vLLM", COLUMNS, lines=by_setting)
def vllm_turns(plan: VllmTurnsPlan) -> Iterator[Row]:
    """Turns of conversations inside vLLM: what is computed, held and answered."""
    sessions = sessions_of(plan, LLM(plan.model, dtype=plan.dtype, num_blocks=8))
    longest = 2 + max(len(all_of(session[-1])) for session in sessions)
    held = blocks_for(longest, VLLM_BLOCK_SIZE)
    full: dict[tuple[int, int], list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        model = Path(folder, "model")
        link_model(plan.model, model)
        for setting in plan.settings:
            num_blocks = held if setting == FULL else plan.num_blocks or held
            with closing(_server(plan, model, setting, longest, num_blocks)) as server:
                server.wait()
                for key, turn, before in _turns(sessions):
                    row, predicted = _turn(server, num_blocks, turn)
                    if setting == FULL:
                        full[key] = predicted
                    agree = None
                    if full:
                        agree = sum(map(eq, predicted, full[key])) / len(predicted)
                    new = len(turn.prompt) - num_shared(before, turn.prompt)
                    about = {"session": key[0], "setting": setting, "turn": key[1], "new": new}
                    yield about | row | {"agreement": agree}


def all_of(turn: Item) -> tuple[int, ...]:
    return turn.prompt + turn.continuation


def _turns(sessions: Sequence[Sequence[Item]]) -> Iterator[tuple[tuple[int, int], Item, tuple[int, ...]]]:
    """Yield (session, place), the turn, and the tokens before it."""
    for number, session in enumerate(sessions):
        before: tuple[int, ...] = ()
        for place, turn in enumerate(session):
            yield (number, place), turn, before
            before = all_of(turn)


def _server(plan: VllmTurnsPlan, model: Path, setting: str, longest: int, num_blocks: int) -> VllmServer:
    options: Row = {
        "dtype": plan.dtype,
        "max-num-seqs": 1,
        "max-num-batched-tokens": plan.chunk,
        "max-model-len": longest,
        "enable-prompt-tokens-details": None,
    }
    if setting != FULL:
        settings: Row = {"policy": plan.policy, "budget": plan.budget, "interval": plan.interval}
        settings["snapshots"] = setting == SNAPSHOTS
        compression = compression_option(plan.model, plan.stats, **settings)
        options["additional-config"] = json.dumps({"kv_compression": compression})
    return VllmServer(plan.vllm_python, plan.threads, num_blocks + 1, model, options)


def _turn(server: VllmServer, num_blocks: int, turn: Item) -> tuple[Row, list[int]]:
    """Return a turn's figures, and the likeliest token at each place of its answer. answer_blocks: held while
    the prompt is computed, at most, by two looks a second."""
    prompt = list(turn.prompt)
    with Gauges(server, RUNNING, (USAGE,)) as gauges:
        started = perf_counter()
        first, cached = _next(server, prompt)
        first_s = perf_counter() - started
    row = {
        "prompt": len(prompt),
        "cached": cached,
        "computed": len(prompt) - cached,
        "first_s": first_s,
        "answer_blocks": round(num_blocks * max(gauges.values[USAGE], default=0.0)),
    }
    end = len(turn.continuation)
    more = [_next(server, prompt + list(turn.continuation[:n]))[0] for n in range(1, end, -(-end // PLACES))]
    return row, [first, *more]


def _next(server: VllmServer, prompt: list[int]) -> tuple[int, int]:
    """Return the likeliest next token, and how many of the prompt's were cached. The token after it is
    computed behind the pass that a prompt makes due, without which nothing is kept."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    found = server.post("/v1/completions", body)
    cached = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return int(found["choices"][0]["token_ids"][0]), int(cached)
