"""The demo model's tasks by name, each in any size from 512 to 4,096 tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.chain import HOP_TOKENS, ChainTask
from kvreclaim.eval.example import SizedTask, TokenKind
from kvreclaim.eval.list_tasks import ZONES, MultiQueryTask, RecallTask, VariableTrackingTask

MIN_TOKENS = 512
MAX_TOKENS = 4096
NOISE = 0.25
MAX_FACTS = 48  # of 64 nodes on a chain, so that some are left for decoys


@dataclass(frozen=True)
class DemoTask:
    """A task in any size; `judged` are the kinds of trace tokens that count as its answers."""

    name: str
    judged: frozenset[TokenKind]
    build: Callable[[int], SizedTask]

    def make(self, num_tokens: int) -> SizedTask:
        """Return the task whose documents have at most `num_tokens` tokens, 512 to 4,096."""
        if not MIN_TOKENS <= num_tokens <= MAX_TOKENS:
            raise InvalidArgumentError(
                f"num_tokens is {num_tokens}; a demo task has {MIN_TOKENS} to {MAX_TOKENS} tokens"
            )
        return self.build(num_tokens)


def _filler_words(num_tokens: int) -> tuple[int, int]:
    """Filler words per step: more of them in longer documents, since there are only 64 nodes."""
    least = min(11, max(2, num_tokens // 256))
    return least, least + 4


def _chain(num_tokens: int) -> ChainTask:
    num_trace_tokens = num_tokens * 3 // 8
    filler_words = _filler_words(num_tokens)
    most = (num_trace_tokens - 1) // (2 * (HOP_TOKENS + filler_words[0]))
    return ChainTask(
        num_prompt_tokens=num_tokens - num_trace_tokens,
        num_trace_tokens=num_trace_tokens,
        filler_words=filler_words,
        num_decoys=min(12, most),
        noise=NOISE,
    )


def _recall(num_tokens: int) -> RecallTask:
    num_facts = min(MAX_FACTS, num_tokens // 32)
    return RecallTask(
        num_tokens=num_tokens,
        num_facts=num_facts,
        asked_per_zone=min(4, (num_facts - 1) // ZONES),
        filler_words=_filler_words(num_tokens),
        num_decoys=min(12, num_facts // 2),
        noise=NOISE,
    )


def _multi_query(num_tokens: int) -> MultiQueryTask:
    num_facts = min(60, num_tokens // 32)
    return MultiQueryTask(
        num_tokens=num_tokens,
        num_facts=num_facts,
        num_asked=num_facts * 2 // 3,
        filler_words=_filler_words(num_tokens),
        noise=NOISE,
    )


def _variable_tracking(num_tokens: int) -> VariableTrackingTask:
    num_chains = min(10, max(3, num_tokens // 256))
    return VariableTrackingTask(
        num_tokens=num_tokens,
        num_chains=num_chains,
        num_asked=num_chains * 2 // 3,
        num_variables=(3, 6),
        filler_words=_filler_words(num_tokens),
        noise=NOISE,
    )


DEMO_TASKS: Mapping[str, DemoTask] = {
    task.name: task
    for task in (
        DemoTask("chain", frozenset({TokenKind.LOOKUP, TokenKind.RESTORE}), _chain),
        DemoTask("recall", frozenset({TokenKind.RESTORE}), _recall),
        DemoTask("multi_query", frozenset({TokenKind.LOOKUP}), _multi_query),
        DemoTask("variable_tracking", frozenset({TokenKind.LOOKUP}), _variable_tracking),
    )
}
"""Name -> task."""


def unfinished(num_tokens: int, count: int) -> list[list[int]]:
    """Return documents with begun answers, cut to this length."""
    task = DEMO_TASKS["recall"].make(MAX_TOKENS)
    require(
        num_tokens <= MAX_TOKENS,
        f"context is {num_tokens} tokens, but a document of the demo model has {MAX_TOKENS} at most; lower "
        "it, or name another model.",
    )
    return [list(task.sample(n).document[:num_tokens]) for n in range(count)]
