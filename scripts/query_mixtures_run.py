"""Teacher-forced accuracy of one policy at one budget, kept in a file as it comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from query_mixtures_grid import Calibration, Row

from kvreclaim import LLM, CompressionConfig
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.stats_builder import Clustering, StatsBuilder
from kvreclaim.eval.chain import ChainTask
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.eval.example import Example, Kind, Stream
from kvreclaim.model.capture import capture_queries

FAR_TRACE = frozenset({Kind.RESTORE, Kind.STACK})
"""Answers that stand in the trace; all other judged ones stand in the prompt."""
NEEDS_STATS = ("query_mixture", "triattention", "expected_attention")
CALIBRATION_DOCUMENTS = 16
INTERVAL, SINKS = 128, 4
FIRST_SEED = 1000
"""Of the examples that are measured: the temperature was chosen on seeds 0 to 23."""


@dataclass(frozen=True)
class Setting:
    """The task that is measured and what is protected.

    model: name of the checkpoint
    task:  a demo task at `tokens`, or "chain-2k": the chain with 25 decoys and plain filler at 1,952 tokens
    """

    model: str
    task: str
    tokens: int
    recent: int

    @property
    def judged(self) -> frozenset[Kind]:
        return DEMO_TASKS["chain" if self.task == "chain-2k" else self.task].judged

    def sampler(self, text: str = "task") -> Any:
        """The task itself, or the variant of it that a calibration reads."""
        share = {"short": 0.5, "long": 1.5}.get(text, 1.0)
        if self.task != "chain-2k":
            if text == "filler":
                return replace(DEMO_TASKS["chain"].make(self.tokens), filler_seed=1)  # type: ignore[type-var]
            return DEMO_TASKS[self.task].make(int(self.tokens * min(share, 4096 / self.tokens)))
        prompt = self.tokens * 1152 // 1952
        base = ChainTask(prompt, self.tokens - prompt, num_decoys=25 * self.tokens // 1952)
        if text == "task":
            return base
        return replace(
            base,
            num_prompt_tokens=int(prompt * share),
            num_trace_tokens=min(800, int((self.tokens - prompt) * share)),
            num_decoys=6,
            filler_seed=int(text == "filler"),
        )


@dataclass
class Results:
    """The measurements of one checkpoint and setting, in a JSON file that is rewritten after each."""

    path: Path
    setting: Setting
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.is_file():
            content = json.loads(self.path.read_text())
            if content["setting"] != asdict(self.setting):
                raise SystemExit(f"{self.path} holds results of {content['setting']}; name another --output.")
            self.found = content["measured"]

    def get(self, key: str, num: int) -> dict[str, Any] | None:
        """A measurement over at least `num` sequences."""
        kept = self.found.get(key)
        return kept if kept is not None and kept["sequences"] >= num else None

    def put(self, key: str, value: dict[str, Any]) -> None:
        self.found[key] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"setting": asdict(self.setting), "measured": self.found})
        temporary = self.path.with_suffix(".partial")
        temporary.write_text(text)
        temporary.replace(self.path)


class Bench:
    """One checkpoint with its examples, statistics and results."""

    def __init__(self, model: Path, setting: Setting, num_sequences: int, results: Results) -> None:
        self.setting, self.results = setting, results
        self.num_sequences = num_sequences
        self.task = setting.sampler()
        self.examples: list[Example] = [
            self.task.sample(FIRST_SEED + number) for number in range(num_sequences)
        ]
        longest = max(len(example.document) for example in self.examples)
        self.llm = LLM(model, num_blocks=min(num_sequences, 64) * (longest // 16 + 2))
        self._stats: dict[Calibration, QueryStats] = {}

    def documents(self, text: str) -> list[Example]:
        """What a calibration reads: examples that evaluation never draws."""
        sampler = self.setting.sampler(text)
        return [sampler.sample(seed, Stream.CALIBRATION) for seed in range(CALIBRATION_DOCUMENTS)]

    def stats(self, how: Calibration) -> QueryStats:
        """Statistics, made once."""
        if how not in self._stats:
            examples = self.documents(how.text)
            parts = [torch.arange(len(e.document)) < len(e.prompt) for e in examples]
            everywhere = torch.ones(sum(map(len, parts)), dtype=torch.bool)
            chosen = {"prompt": torch.cat(parts), "trace": ~torch.cat(parts)}.get(how.text, everywhere)
            clustering = Clustering(how.num_centers, how.shared, how.seed, how.min_weight, how.min_distance)
            builder = StatsBuilder(self.llm.loaded.facts, clustering)
            capture_queries(
                self.llm.loaded,
                [list(example.document) for example in examples],
                lambda layer, queries: builder.add_layer(layer, queries[:, chosen]),
            )
            self._stats[how] = builder.build()
        return self._stats[how]

    def budget(self, fraction: float) -> int:
        """Tokens kept: a share of the longest document."""
        return round(self.setting.tokens * fraction)

    def measure(self, row: Row, fraction: float) -> dict[str, Any]:
        """Shares of right look-ups and carries of each sequence; from the file if it is there."""
        key = row.key(fraction)
        if (kept := self.results.get(key, self.num_sequences)) is not None:
            return kept
        config = None
        if row.policy != "full":
            wanted = any(name in row.policy for name in NEEDS_STATS)
            config = CompressionConfig(
                row.policy,
                self.budget(fraction),
                interval=INTERVAL,
                sinks=SINKS,
                recent=self.setting.recent,
                stats=self.stats(row.calibration) if wanted else None,
                options=row.options,
            )
        outputs = self.llm.score(
            [list(e.prompt) for e in self.examples], [list(e.trace) for e in self.examples], config
        )
        if failed := [out.error for out in outputs if out.error is not None]:
            raise SystemExit(f"{row.label}: {failed[0]}")
        predicted = [out.predicted for out in outputs]
        judged = self.setting.judged
        value = {
            "label": row.label,
            "policy": row.policy,
            "options": row.options,
            "calibration": asdict(row.calibration),
            "fraction": fraction,
            "sequences": self.num_sequences,
            "centres": self._stats[row.calibration].metadata.num_centers
            if row.calibration in self._stats
            else None,
            "compactions": sum(out.metrics.compactions for out in outputs),
            "lookups": _shares(self.examples, predicted, judged - FAR_TRACE),
            "carries": _shares(self.examples, predicted, judged & FAR_TRACE),
        }
        self.results.put(key, value)
        return value


def _shares(
    examples: Sequence[Example], predicted: Sequence[Sequence[int]], kinds: frozenset[Kind]
) -> list[float] | None:
    """The share of right tokens of these kinds per sequence; None where the task has none."""
    shares = []
    for example, guesses in zip(examples, predicted, strict=True):
        triples = zip(example.trace, guesses, example.kinds, strict=True)
        right = [gold == guess for gold, guess, kind in triples if kind in kinds]
        if right:
            shares.append(sum(right) / len(right))
    return shares if len(shares) == len(examples) else None
