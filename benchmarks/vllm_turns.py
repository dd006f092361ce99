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
from pathlib import Path
from time import perf_counter
from urllib.request import Request, urlopen

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
from kvreclaim.bench.systems.server_process import ANSWER_TIMEOUT_S, NAME, Gauges, VllmServer
from kvreclaim.bench.systems.worker_process import kv_bytes_per_token, link_model
from kvreclaim.checks import require
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.task import Item
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model_paths import statistics_beside
from kvreclaim.options import option

BLOCK_SIZE = 32
RUNNING, USAGE = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
PLACES = 8
"""Of an answer, evenly spaced: where the likeliest token is compared."""
SERVED = "kvreclaim_snapshot_tokens_total"


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
    longest = max(len(all_of(session[-1])) for session in sessions)
    held = blocks_for(longest + 2, BLOCK_SIZE)
    full: dict[tuple[int, int], list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        model = Path(folder, "model")
        link_model(plan.model, model)
        for setting in plan.settings:
            num_blocks = held if setting == FULL else plan.num_blocks or held
            with closing(_server(plan, model, setting, longest, num_blocks)) as server:
                server.wait()
                for number, session in enumerate(sessions):
                    before: Sequence[int] = ()
                    for place, turn in enumerate(session):
                        row, predicted = _turn(server, num_blocks, turn)
                        right = full.setdefault((number, place), predicted) if setting == FULL or full else []
                        same = sum(a == b for a, b in zip(predicted, right, strict=False))
                        new = len(turn.prompt) - num_shared(before, turn.prompt)
                        about = {"session": number, "setting": setting, "turn": place, "new": new}
                        yield about | row | {"agreement": same / len(predicted) if right else None}
                        before = all_of(turn)


def all_of(turn: Item) -> tuple[int, ...]:
    return turn.prompt + turn.continuation


def _server(plan: VllmTurnsPlan, model: Path, setting: str, longest: int, num_blocks: int) -> VllmServer:
    stats = plan.stats or statistics_beside(plan.model)
    compression: Row = {"policy": plan.policy, "budget": plan.budget, "interval": plan.interval}
    compression |= {"stats": str(stats.absolute())} if stats.is_file() else {}
    config = {"kv_compression": compression | {"snapshots": setting == SNAPSHOTS}}
    options = {
        "dtype": plan.dtype,
        "block-size": BLOCK_SIZE,
        "num-gpu-blocks-override": num_blocks + 1,  # with vLLM's null block
        "max-num-seqs": 1,
        "max-num-batched-tokens": plan.chunk,
        "max-model-len": longest + 2,
        "enable-prompt-tokens-details": None,
        **({} if setting == FULL else {"additional-config": json.dumps(config)}),
    }
    pool_bytes = (num_blocks + 1) * BLOCK_SIZE * kv_bytes_per_token(plan.model, 2)
    return VllmServer(plan.vllm_python, plan.threads, pool_bytes, model, options, plugin=setting != FULL)


def _turn(server: VllmServer, num_blocks: int, turn: Item) -> tuple[Row, list[int]]:
    """Return a turn's figures, and the likeliest token at each place of its answer. blocks: held while the
    prompt is computed, at most, by two looks a second; blocks_left: of snapshots are free for any request."""
    prompt, served = list(turn.prompt), server.metrics().get(SERVED, 0.0)
    with Gauges(server, RUNNING, (USAGE,)) as gauges:
        started = perf_counter()
        first, cached = _next(server, prompt)
        first_s = perf_counter() - started
    row = {
        "prompt": len(prompt),
        "cached": cached,
        "snapshot": round(server.metrics().get(SERVED, 0.0) - served),
        "computed": len(prompt) - cached,
        "first_s": first_s,
        "answer_blocks": round(num_blocks * max(gauges.values[USAGE], default=0.0)),
        "blocks_left": 0,
    }
    end = len(turn.continuation)
    more = [_next(server, prompt + list(turn.continuation[:n]))[0] for n in range(1, end, -(-end // PLACES))]
    return row, [first, *more]


def _next(server: VllmServer, prompt: list[int]) -> tuple[int, int]:
    """Return the likeliest next token, and how many of the prompt's were cached. The token after it is
    computed behind the pass that a prompt makes due, without which nothing is kept."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    request = Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        found = json.load(answer)
    details = found["usage"]["prompt_tokens_details"] or {}
    return int(found["choices"][0]["token_ids"][0]), int(details.get("cached_tokens") or 0)
