"""The report of an evaluation, as JSON with all of it and CSV with its rows."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from kvreclaim.chunks import WHOLE
from kvreclaim.compression_settings import AUTO
from kvreclaim.config import DENSE
from kvreclaim.eval.plan import SERVER, keeps, policy_label
from kvreclaim.eval.task import Metric
from kvreclaim.outputs import write_json, writing

Bounds = tuple[float, float]


class EvalRow(BaseModel):
    """One policy at one budget on one task, over all seeds.

    status, reason:  "ok", with a reason if something was omitted; "refused": the policy cannot run here;
                     "error": the figures are invalid
    fraction:        of the full cache's bytes in the model's own dtype, at each sequence's final length; 1
                     for the full cache, None for a budget in tokens
    tokens:          the requested budget, if it was in tokens
    max_loss:        requested instead of a budget; extra's `broken` is then the share of examples that lost
                     more
    budget:          the budget in tokens, in whole blocks; mean over the examples
    value:           of the metric; accuracy repeats it if the metric is accuracy, else None
    ci95:            of value, over examples; ci_method: wilson or bootstrap
    value_by_seed:   seed -> value
    of_full:         value / value of the full cache, in the first format of the run, on the same examples;
                     of_full_ci95: paired bootstrap
    num_examples, num_judged: examples, and verdicts in them; num_tokens: of a sequence at its end, mean
    kv_bytes:        most K/V bytes of a sequence's blocks after its prompt, mean over examples
    kv_bytes_peak:   most at any time, including the prompt's prefill
    kv_bytes_budget: fraction x the bytes of the full cache, mean; kv_bytes_full: of the full cache's blocks,
                     both in the model's own dtype; kv_bytes_budget of a budget in tokens: in the row's format
    blocks_freed, tokens_evicted, compactions, preemptions: summed over the examples
    reclaim_efficiency: blocks freed / blocks that perfect packing would have freed
    examples_compressed: examples with at least one compression
    tokens_per_s:    over the row's batches, compressions included; speed_of: "scoring" (teacher-forced;
                     computed tokens, without prefix-cache hits) or "generation" (generated tokens)
    is_auto:         whether auto chose the policy
    extra:           further figures, mean over examples (exact_match, progress, kl, ...)
    lost_at, asked_at: wrong and all verdicts by the position of their evidence, in tenths of the sequence
    cached_by_turn, agreement_by_turn: of sessions: as in task.TaskScore, mean over those with such a turn
    """

    policy: str
    is_auto: bool = False
    fraction: float | None
    tokens: int | None = None
    max_loss: float | None = None
    budget: int | None = None
    kv_cache_dtype: str
    sparse_prefill: str = DENSE
    chunk_reuse: str = WHOLE
    task: str
    metric: Metric
    status: Literal["ok", "refused", "error"] = "ok"
    reason: str | None = None
    value: float | None = None
    accuracy: float | None = None
    ci95: Bounds | None = None
    ci_method: str | None = None
    value_by_seed: dict[str, float] = {}
    of_full: float | None = None
    of_full_ci95: Bounds | None = None
    num_examples: int = 0
    num_judged: float = 0
    num_tokens: float | None = None
    kv_bytes: float | None = None
    kv_bytes_peak: float | None = None
    kv_bytes_budget: float | None = None
    kv_bytes_full: float | None = None
    blocks_freed: int | None = None
    blocks_perfect: int | None = None
    reclaim_efficiency: float | None = None
    tokens_evicted: int | None = None
    compactions: int | None = None
    examples_compressed: int | None = None
    preemptions: int | None = None
    tokens_per_s: float | None = None
    speed_of: Literal["scoring", "generation"] | None = None
    elapsed_s: float | None = None
    extra: dict[str, float] = {}
    lost_at: list[int] = []
    asked_at: list[int] = []
    cached_by_turn: list[float] = []
    agreement_by_turn: list[float] = []

    @property
    def name(self) -> str:
        """The policy, the KV format if one was named, and how prompts were computed if not dense and
        whole."""
        choices = ((self.kv_cache_dtype, AUTO), (self.sparse_prefill, DENSE), (self.chunk_reuse, WHOLE))
        return ", ".join((self.policy_label, *(value for value, default in choices if value != default)))

    @property
    def policy_label(self) -> str:
        """The policy, with "auto" before it if auto chose it."""
        return policy_label(self.policy, is_auto=self.is_auto)

    @property
    def mix(self) -> str:
        """Policy, format and budget."""
        of = "" if self.fraction is None else " of the bytes"
        return self.name if self.policy == "full" else f"{self.name}, {self.keeps}{of}"

    @property
    def keeps(self) -> str:
        """The share in per cent, or tokens; "-" for a server's cache."""
        return "-" if self.policy == SERVER else keeps(self.fraction, self.tokens, self.max_loss)

    @property
    def bytes_per_token(self) -> float | None:
        """K/V bytes held after the prompt, per token of the text."""
        return None if self.kv_bytes is None or not self.num_tokens else self.kv_bytes / self.num_tokens


class FormatFacts(BaseModel):
    """A KV format of the run. bytes_per_token: in full blocks, scales and centres included."""

    name: str
    bytes_per_token: float
    kernels: str


class ReportHeader(BaseModel):
    """The measured setup. url: of a server, instead of the engine's facts"""

    command: str
    version: str
    model: str
    url: str | None = None
    fingerprint: str = ""
    dtype: str = ""
    device: str = ""
    kernels: str = ""
    block_size: int | None = None
    kv_bytes_per_token: int = 0
    kv_formats: list[FormatFacts] = []
    interval: int | None = None
    sinks: int | None = None
    recent: int | None = None
    protect_prompt: bool = False
    mode: str | None = None
    seeds: list[int]
    num_examples: int
    tasks: dict[str, dict[str, Any]]

    @property
    def setup(self) -> str:
        """One line on the model, the window and the seeds."""
        parts = [f"interval {self.interval}, {self.sinks} sinks, {self.recent} recent tokens"]
        parts += ["prompt protected"] * self.protect_prompt
        parts += [] if self.mode is None else [f"mode {self.mode}"]
        where = self.url or f"{self.dtype} on {self.device}; {', '.join(parts)}"
        return f"{self.model}, {where}; seeds {', '.join(map(str, self.seeds))}"


class EvalReport(BaseModel):
    """Header and rows."""

    header: ReportHeader
    rows: list[EvalRow]

    @property
    def errors(self) -> list[EvalRow]:
        """Rows with invalid figures."""
        return [row for row in self.rows if row.status == "error"]

    @property
    def problems(self) -> dict[tuple[str, str], list[str]]:
        """("refused", "error" or "note", reason) -> the affected cells."""
        found: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.reason is not None:
                kind = "note" if row.status == "ok" else row.status
                cell = f"{row.name} {row.keeps} on {row.task}"
                found.setdefault((kind, row.reason), []).append(cell)
        return found

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(row.task for row in self.rows))

    def of(self, task: str) -> list[EvalRow]:
        return [row for row in self.rows if row.task == task]

    def extras(self, task: str) -> list[str]:
        """Names of the further figures of a task's rows."""
        return list(dict.fromkeys(name for row in self.of(task) for name in row.extra))

    def summary(self, task: str) -> str:
        """One line on a task: examples, verdicts, and the kind of tokens/s."""
        run = next((row for row in self.of(task) if row.num_examples), None)
        if run is None:
            return "nothing was run"
        return f"{run.num_examples} examples, {run.num_judged:g} verdicts; tokens/s of {run.speed_of}"

    def row(self, policy: str, task: str, budget: float | None = None) -> EvalRow:
        """The first row of a policy on a task (and at a budget, a share or tokens). Raises: KeyError."""
        for row in self.rows:
            if (row.policy, row.task) == (policy, task) and budget in (None, row.fraction, row.tokens):
                return row
        raise KeyError(f"no row of {policy} on {task} at {budget}")

    def write_json(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))

    def write_csv(self, path: Path) -> None:
        """A line for each row; lists and maps as JSON-like text, ci95 as two columns."""
        rows = [_flat(row) for row in self.rows]
        with writing(path), path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)


def _flat(row: EvalRow) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.model_dump(mode="json").items():
        if name in ("ci95", "of_full_ci95"):
            flat[f"{name}_low"], flat[f"{name}_high"] = value or (None, None)
        elif name == "extra":
            flat |= value
        elif isinstance(value, dict):
            flat[name] = " ".join(f"{key}={item:.6g}" for key, item in value.items())
        elif isinstance(value, list):
            flat[name] = " ".join(map(str, value))
        else:
            flat[name] = value
    return flat


def frontier(rows: Sequence[EvalRow]) -> list[EvalRow]:
    """Return the rows of one task on the Pareto front of bytes and value, smallest first: for a number of
    bytes, the last row within it is the best that was tried."""
    done = [row for row in rows if row.status == "ok" and row.value is not None and row.bytes_per_token]
    best: list[EvalRow] = []
    for row in sorted(done, key=lambda row: (row.bytes_per_token or 0.0, -_worth(row))):
        if not best or _worth(row) > _worth(best[-1]):
            best.append(row)
    return best


def _worth(row: EvalRow) -> float:
    """Higher is better."""
    value = row.value or 0.0
    return -value if row.metric is Metric.PERPLEXITY else value
