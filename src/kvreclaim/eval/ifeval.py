"""IFEval's rules (arXiv 2311.07911) in the system prompt, a long context, then a request."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from jinja2 import TemplateError

from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.packages import task_package
from kvreclaim.eval.plan import TaskOptions
from kvreclaim.eval.task import Answer, Item, PlainTask, TaskScore
from kvreclaim.eval.text.prose import Encoder, ProseQuestion, fit, framed, spread

IFEVAL = "ifeval"
EXTRA = "ifeval"
MAX_NEW_TOKENS = 512
LEFT_OUT = (
    "combination:repeat_prompt",  # needs the prompt's text
    "language:response_language",  # guessed with random numbers
    "length_constraints:number_sentences",  # these two need nltk's data
    "change_case:capital_word_frequency",
)
HEAD = "Follow these rules in every answer:\n"
TOPICS = (
    "a week in the mountains",
    "how to learn a language",
    "moving to another town",
    "a small garden in spring",
    "why libraries matter",
    "cooking for many guests",
)


@dataclass(frozen=True)
class IfevalRule:
    """One rule of IFEval: its id, its arguments and its text."""

    name: str
    arguments: Mapping[str, Any]
    text: str


@dataclass(frozen=True)
class IfevalTask(PlainTask):
    """Two rules that do not contradict each other, drawn by the package. The packages have no prompts of
    IFEval, so the requests are our own.

    value: prompts with an answer that follows all rules (strict); extra.rules: rules followed (strict)
    """

    encode: Encoder
    module: Any
    num_tokens: int
    max_new_tokens: int
    name = IFEVAL

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "package": version("if-verifiable"),
            "template": self.encode.identity,
            "num_tokens": self.num_tokens,
            "max_new_tokens": self.max_new_tokens,
        }

    def item(self, seed: int, index: int) -> Item:
        name = f"{IFEVAL}:{seed}:{index}"
        rules = self._rules(name)
        system = HEAD + "\n".join(f"- {rule.text}" for rule in rules)

        def write(num_sentences: int) -> ProseQuestion:
            rng = random.Random(name)
            request = f"\n\nThat was an old diary. Now write about {rng.choice(TOPICS)}."
            story, _ = spread(rng, (), (), num_sentences)
            return ProseQuestion(framed("", story, request, ())[0], ())

        encode = replace(self.encode, system=system)
        _, tokens = fit(write, encode, self.num_tokens - self.max_new_tokens, IFEVAL)
        return Item(tokens, max_new_tokens=self.max_new_tokens, payload=rules)

    def _rules(self, name: str) -> tuple[IfevalRule, ...]:
        """The package draws the rules' arguments from Python's global random numbers."""
        known, before = self.module.INSTRUCTION_DICT, random.getstate()
        conflicts = self.module.conflict_make(dict(self.module.INSTRUCTION_CONFLICTS))
        random.seed(name)
        try:
            names = [each for each in known if each not in LEFT_OUT]
            pairs = [(a, b) for a in names for b in names if a < b and b not in conflicts[a]]
            rules = []
            for each in random.choice(pairs):
                checker = known[each](each)
                text = checker.build_description()
                rules.append(IfevalRule(each, checker.get_instruction_args() or {}, text))
            return tuple(rules)
        finally:
            random.setstate(before)

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        common = task_package("if_verifiable.common", IFEVAL, EXTRA)
        names = [rule.name for rule in item.payload]
        arguments = [dict(rule.arguments) for rule in item.payload]
        _, scores = common.evaluate_instructions(
            answer.text, names, arguments, "", self.module.INSTRUCTION_DICT
        )
        return TaskScore(scores.binary_strict, 1, extra={"rules": scores.partial_strict})


def ifeval_task(llm: LLM, options: TaskOptions) -> IfevalTask:
    """Raises: InvalidArgumentError for a missing package, or a chat template that is missing or lacks a
    system prompt."""
    encode = Encoder(llm.tokenizer)
    encode.require_template(IFEVAL, llm.loaded.facts.name)
    module = task_package("if_verifiable.ifeval.instructions_registry", IFEVAL, EXTRA)
    task = IfevalTask(encode, module, options.num_tokens, options.max_new_tokens or MAX_NEW_TOKENS)
    try:
        task.item(0, 0)
    except TemplateError as error:
        raise InvalidArgumentError(
            f"task {IFEVAL} needs a system prompt, and the chat template of {llm.loaded.facts.name} refuses "
            f"it ({error}); take another model."
        ) from error
    return task
