"""RULER's tasks for the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from typing import Any

from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.plan import KNOWN, RULER, UNKNOWN, TaskOptions
from kvreclaim.eval.ruler.rows import PACKAGE, PUBLISHED_ROWS, RulerRows, has_punkt
from kvreclaim.eval.task import Answer, Item, PlainTask, TaskScore
from kvreclaim.eval.task_names import published_tasks
from kvreclaim.eval.text.prose import Encoder


@dataclass(frozen=True)
class RulerTask(PlainTask):
    """One task of RULER. The row is the user's turn, and the model continues the beginning of the answer.

    known: the question is in the cache when it is compressed; else the document is compressed alone
    kind:  RULER's script, which defines the scoring
    Source: arXiv 2404.06654. Scored by the package's own rules; a point is the share of a row's answers.
    """

    name: str
    rows: RulerRows
    kind: str
    max_new_tokens: int
    known: bool
    suite = RULER

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "package": version(PACKAGE),
            "punkt": has_punkt(),
            "template": Encoder(self.rows.tokenizer).identity,
            "num_tokens": self.rows.num_tokens,
            "max_new_tokens": self.max_new_tokens,
            "question": KNOWN if self.known else UNKNOWN,
        }

    def num_examples(self, wanted: int) -> int:
        return min(wanted, PUBLISHED_ROWS)

    def item(self, seed: int, index: int) -> Item:
        row = self.rows.row(self.name.partition(":")[2], seed, index)
        encode = Encoder(self.rows.tokenizer)
        turn = encode.render(row.document + row.question)
        prompt = encode.tokens(turn + row.answer_prefix)
        document = encode.tokens(turn[: turn.rfind(row.question)])
        shared = list(takewhile(lambda pair: pair[0] == pair[1], zip(document, prompt, strict=False)))
        return Item(
            prompt,
            max_new_tokens=self.max_new_tokens,
            compress_at=None if self.known else len(shared),
            payload=row.answers,
        )

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        from long_context_eval.eval.synthetic.constants import TASKS

        (percent,) = TASKS[self.kind]["metric_fn_per_sample"]([answer.text], [list(item.payload)])
        return TaskScore(points=percent / 100, out_of=1)


def ruler_tasks(names: Sequence[str], llm: LLM, options: TaskOptions) -> dict[str, RulerTask]:
    """Return the tasks of RULER among the names; all share one maker of rows. Raises: InvalidArgumentError if
    the rows don't fit."""
    wanted = {name: name.partition(":")[2] for name in names if name.startswith(f"{RULER}:")}
    if not wanted:
        return {}
    known = published_tasks()
    rows = RulerRows(llm.tokenizer, tuple(dict.fromkeys(wanted.values())), options.num_tokens)
    tasks = {
        name: RulerTask(
            name,
            rows,
            known[task]["task"],
            options.max_new_tokens or known[task]["tokens_to_generate"],
            options.question == KNOWN,
        )
        for name, task in wanted.items()
    }
    for made in tasks.values():
        made.item(0, 0)
    return tasks
