"""Turns of agents' conversations: the full cache, compression, and compression with conversation snapshots.

    python -m benchmarks turns --model DIR                   # made sessions
    python -m benchmarks turns --model DIR --sessions 4      # recorded ones (pip install "kvreclaim[agents]")
    python -m benchmarks turns --model DIR --drop 2 --settings full,cleared,dropped    # old tool outputs go

Answers are given (teacher forcing), so that every setting sees the same tokens. Tokens and blocks are exact
counts; the time to the first token is that of the prompt's last step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

from benchmarks.runner import TextPlan, case
from kvreclaim.bench.common import Row
from kvreclaim.bench.systems.base import text_tokens
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression_settings import AUTO
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.agents import recorded_sessions
from kvreclaim.eval.task import Item
from kvreclaim.eval.text.prose import Encoder
from kvreclaim.options import option
from kvreclaim.sampling_params import SamplingParams

FULL, COMPRESSED, SNAPSHOTS = "full", "compressed", "with snapshots"
CLEARED, DROPPED = "cleared", "dropped"
"""The full cache, where placeholders stand for old tool outputs (kv_drop exact), or they leave it (lossy)."""
PLACEHOLDER = 4
"""Tokens that stand for a cleared output."""
ANSWER = 100
TOOL = 1000, 4000
"""Least and most tokens of a made tool output."""


@dataclass(frozen=True, kw_only=True)
class TurnsPlan(TextPlan):
    """Sessions, each under every setting."""

    policy: str = option(AUTO, "Policy.")
    budget: int = option(2048, "Tokens that it keeps.", low=1, unit=" tokens")
    interval: int = option(128, "Tokens over the budget at which it compresses.", low=1, unit=" token")
    stats: Path | None = option(None, "Statistics; default: those beside the model.")
    sessions: int = option(0, "Recorded sessions; 0: one that is made.", low=0)
    turns: int = option(40, "Turns of the made session, and most of a recorded one.", low=2)
    scale: float = option(
        0.25, "Of the made session's tool outputs, 1,000 to 4,000 tokens.", low=0.01, high=1
    )
    num_tokens: int = option(32_000, "Tokens of the longest session.", low=64)
    chunk: int = option(2048, "Tokens of a prompt that one step computes.", low=1)
    drop: int = option(2, "Last tool outputs that stay, where older ones are cleared or dropped.", low=1)
    settings: tuple[str, ...] = option((FULL, COMPRESSED, SNAPSHOTS), "Settings, comma-separated.")


def made_session(plan: TurnsPlan, llm: LLM) -> tuple[Item, ...]:
    """Turns with tool outputs of uneven lengths, as far as they fit."""
    random, lengths = Random(0), []
    while len(lengths) < plan.turns and sum(map(sum, lengths)) < plan.num_tokens:
        lengths.append((int(plan.scale * random.randint(*TOOL)), max(2, int(ANSWER * plan.scale))))
    tokens = text_tokens(plan.text, sum(map(sum, lengths)), llm.loaded)
    found, end = [], 0
    for new, answer in lengths:
        if (end := end + new + answer) <= plan.num_tokens:
            found.append(Item(tuple(tokens[: end - answer]), tuple(tokens[end - answer : end])))
    return tuple(found)


def sessions_of(plan: TurnsPlan, llm: LLM) -> list[tuple[Item, ...]]:
    if not plan.sessions:
        return [made_session(plan, llm)]
    task = recorded_sessions(Encoder(llm.tokenizer), plan.num_tokens)
    items = (task.item(0, index) for index in range(task.num_examples(min(plan.sessions, sys.maxsize))))
    return [item.turns[: plan.turns] for item in items]


COLUMNS = {
    "session": "{session}",
    "setting": "{setting}",
    "turns": "{turns}",
    "last prompt": "{tokens:,}",
    "new tokens": "{new:,}",
    "computed": "{computed:,}",
    "most, of a turn's new": "{most:.2f}",
    "first token, s": "{first_s:.2f}",
    "blocks, answering": "{blocks}",
    "of snapshots": "{left}",
    "agreement": "{agreement:.3f}",
}


def by_setting(rows: list[Row]) -> list[Row]:
    """A line per session and setting, over the turns behind the first."""
    lines = []
    for session, setting in dict.fromkeys((row["session"], row["setting"]) for row in rows):
        own = [row for row in rows if (row["session"], row["setting"]) == (session, setting) and row["turn"]]
        if not own:
            continue
        agreed = [row["agreement"] for row in own if row["agreement"] is not None]
        lines.append(
            {
                "session": session,
                "setting": setting,
                "turns": len(own) + 1,
                "tokens": own[-1]["prompt"],
                "new": sum(row["new"] for row in own),
                "computed": sum(row["computed"] for row in own),
                "most": max(row["computed"] / row["new"] for row in own),
                "first_s": median(row["first_s"] for row in own),
                "blocks": max(row["answer_blocks"] for row in own),
            }
            | ({"left": max(row["blocks_left"] for row in own)} if "blocks_left" in own[0] else {})
            | ({"agreement": sum(agreed) / len(agreed)} if agreed else {})
        )
    return lines


@case("turns behind the first", COLUMNS, lines=by_setting)
def turns(plan: TurnsPlan) -> Iterator[Row]:
    """Turns of conversations: what is computed, held and answered."""
    compression = CompressionConfig(
        plan.policy,
        plan.budget,
        interval=plan.interval,
        stats=None if plan.stats is None else str(plan.stats),
    )
    llm = LLM(
        plan.model,
        dtype=plan.dtype,
        max_num_seqs=1,
        max_model_len=plan.num_tokens + 2,
        max_num_batched_tokens=plan.chunk,
        prefix_snapshot_fraction=1.0,
    )
    for number, session in enumerate(sessions_of(plan, llm)):
        full: list[list[int]] = []
        for setting in plan.settings:
            llm.engine.reset_prefix_cache()
            before: Sequence[int] = ()
            for place, turn in enumerate(session):
                config = compression if setting in (COMPRESSED, SNAPSHOTS) else None
                old = outputs_of(session[: place + 1])[: -plan.drop] if setting in (CLEARED, DROPPED) else []
                row, predicted = _turn(llm, turn, config, old, setting, num_before=len(before))
                if setting == FULL:
                    full.append(predicted)
                agree = None
                if full:
                    same = sum(a == b for a, b in zip(predicted, full[place], strict=True))
                    agree = same / len(predicted)
                new = len(turn.prompt) - num_shared(before, turn.prompt)
                about = {"session": number, "setting": setting, "turn": place, "new": new}
                yield about | row | {"agreement": agree}
                before = turn.prompt + turn.continuation


def outputs_of(turns: Sequence[Item]) -> list[tuple[int, int]]:
    """The tokens of each turn's tool output in the last one's prompt."""
    found, end = [], 0
    for turn in turns:
        found.append((end, len(turn.prompt)))
        end = len(turn.prompt) + len(turn.continuation)
    return found


def cleared(prompt: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """The prompt with little left of each span."""
    found: list[int] = []
    end = 0
    for start, stop in spans:
        found += prompt[end : min(start + PLACEHOLDER, stop)]
        end = stop
    return [*found, *prompt[end:]]


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _turn(
    llm: LLM,
    turn: Item,
    config: CompressionConfig | None,
    old: list[tuple[int, int]],
    setting: str,
    *,
    num_before: int,
) -> tuple[Row, list[int]]:
    """blocks: held by the request at most; blocks_left: by snapshots behind it. old: tool outputs that are
    cleared or dropped; num_before: tokens of the turn before, with its answer."""
    drops = {"drop_spans": old, "drop_at": num_before + 1} if setting == DROPPED and old else {}
    prompt = cleared(turn.prompt, old) if setting == CLEARED else list(turn.prompt)
    engine, compressor = llm.engine, None if config is None else llm.compressor(config)
    started, first_s = perf_counter(), None
    request = engine.add_request(
        "turn",
        prompt,
        SamplingParams(max_tokens=1),
        compressor,
        continuation=list(turn.continuation),
        conversation_snapshots=setting in (SNAPSHOTS, DROPPED),
        **drops,
    )
    [seq] = request.sequences
    while not request.finished:
        engine.step()
        if first_s is None and seq.num_computed >= seq.num_prompt:
            first_s = perf_counter() - started
    found = request.score_output()
    assert found.error is None, found.error
    metrics = found.metrics
    row = {
        "prompt": metrics.num_prompt_tokens,
        "cached": metrics.num_cached_tokens,
        "snapshot": metrics.num_snapshot_tokens,
        "computed": metrics.num_prompt_tokens - metrics.num_cached_tokens,
        "first_s": first_s,
        "blocks": metrics.peak_blocks,
        "answer_blocks": metrics.answer_blocks,
        "blocks_left": engine.scheduler.snapshots.num_blocks,
    }
    return row, found.predicted
