"""The demo's results, as data."""

from __future__ import annotations

from pydantic import BaseModel

from kvreclaim.eval.report import EvalRow


class PoolRun(BaseModel):
    """One batch of generations in the demo's pool under one policy.

    fraction:    budget / final length; None for the full cache
    peak_blocks: most blocks of the pool in use at once
    """

    policy: str
    fraction: float | None
    budget: int | None
    peak_blocks: int
    preemptions: int
    tokens_per_s: float
    elapsed_s: float
    blocks_over_time: list[int]

    @property
    def keeps(self) -> str:
        return "all" if self.fraction is None else f"{self.fraction:.0%}"

    @property
    def label(self) -> str:
        return self.policy if self.fraction is None else f"{self.policy} {self.keeps}"


class PolicyRun(PoolRun):
    """One policy at one budget: the same sequences scored, and the same generations.

    accuracy:          teacher-forced: look-ups and carries right, over num_scored sequences
    lookup_accuracy:   of look-ups alone (evidence in the prompt)
    carry_accuracy:    of carries alone (evidence in the far trace)
    progress:          free-running: share of the trace before the first error, mean over num_generated
    exact_match:       free-running: share of sequences that are right to the end
    freed_in_place:    blocks that would have come free had all survivors stayed in their slots
    chance_efficiency: what evicting at random without moving would reclaim: (1 - fraction)^block_size
    """

    num_scored: int
    accuracy: float
    lookup_accuracy: float
    carry_accuracy: float
    num_generated: int
    progress: float
    exact_match: float
    tokens_evicted: int
    blocks_freed: int
    freed_in_place: int
    reclaim_efficiency: float | None
    chance_efficiency: float | None


class LoadRun(PoolRun):
    """Many requests at once. longest_wait_s: until the last of them had its first token"""

    num_requests: int
    longest_wait_s: float
    most_running: int
    mean_running: float


class CodeQuestion(BaseModel):
    """A question on a text's code in a conversation. answers: by policy and budget, in order of arrival."""

    question: str
    code: str
    answers: dict[str, str]


class RealReport(BaseModel):
    """The demo's results on a real language model.

    rows: codes and perplexity in real text, as `kvreclaim eval` reports them; num_tokens of each document
    load: conversations of num_load_tokens at once in num_blocks
    """

    model: str
    dtype: str
    device: str
    kernels: str
    block_size: int
    num_blocks: int
    num_tokens: int
    num_talk_tokens: int
    num_load_tokens: int
    rows: list[EvalRow]
    asked: list[CodeQuestion]
    load: list[LoadRun]
    elapsed_s: float


class DemoReport(BaseModel):
    """Everything the demo measured, and what it was measured on."""

    command: str
    model: str
    dtype: str
    device: str
    kernels: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    kv_bytes_per_block: int
    final_length: int
    interval: int
    sinks: int
    recent: int
    elapsed_s: float
    runs: list[PolicyRun]
    load: list[LoadRun]
    real: RealReport | None = None
