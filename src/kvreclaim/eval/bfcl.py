"""BFCL's multi-turn cases: in each turn the model calls tools until it needs no more."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

from kvreclaim.checks import require
from kvreclaim.engine.api.chat import Speaker, num_system_tokens, render_chat
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.agents import cached_share
from kvreclaim.eval.bfcl_cases import REFUSED, BfclCase, load_cases, most_steps
from kvreclaim.eval.plan import TaskOptions
from kvreclaim.eval.task import Answer, Conversation, Item, PlainTask, TaskScore
from kvreclaim.eval.task_names import BFCL_CATEGORIES
from kvreclaim.parsers.formats import Splitter
from kvreclaim.parsers.json_calls import HERMES
from kvreclaim.parsers.pieces import Text, ToolCall, merged

MAX_NEW_TOKENS = 256
FENCED = re.compile(r'```(?:json)?\s*(\{\s*"name".*?\})\s*```', re.DOTALL)


@dataclass
class BfclSession(Conversation):
    """A conversation. A turn is done when the model answers without a call.

    texts: answers by turn; turns: figures of each (Answer.turns), with "calls", "accepted" (calls that their
    function accepted) and "done"
    """

    task: BfclTask
    case: BfclCase
    messages: list[dict[str, Any]] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    turns: list[dict[str, float]] = field(default_factory=list)

    def request(self) -> Item | None:
        if not self.turns or self.turns[-1]["done"]:
            if len(self.turns) == len(self.case.truth):
                return None
            self.messages += self.case.turn(len(self.turns))
            self.turns.append(dict.fromkeys(("prompt", "cached", "calls", "accepted", "done"), 0.0))
            self.texts.append([])
        if len(self.texts[-1]) > most_steps():
            return None
        task = self.task
        prompt = task.prompt(self.case, self.messages, len(self.turns) - 1)
        fits = len(prompt) + task.max_new_tokens <= task.num_tokens
        return Item(prompt, max_new_tokens=task.max_new_tokens) if fits else None

    def take(self, text: str, num_prompt: int, num_cached: int) -> None:
        self.texts[-1].append(text)
        (content, calls), turn = parsed(text), self.turns[-1]
        message = {"role": "assistant", "content": content}
        turn["prompt"] += num_prompt
        turn["cached"] += num_cached
        if not calls:
            turn["done"] = 1.0
            self.messages.append(message)
            return
        results = self.case.run([step for texts in self.texts for step in steps_of(texts)])
        turn["calls"] += len(calls)
        turn["accepted"] += sum(not result.startswith(REFUSED) for result in results)
        made = [
            {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in calls
        ]
        self.messages.append({**message, "tool_calls": made})
        self.messages += [{"role": "tool", "content": result} for result in results]

    @property
    def answer(self) -> Answer:
        prompted = [turn for turn in self.turns if turn["prompt"]]
        return Answer(turns=tuple(prompted), texts=tuple(map(tuple, self.texts[: len(prompted)])))


def parsed(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split an answer into text and tool calls. As in llama.cpp, calls in fences count: Qwen2.5-Coder's."""
    found = Splitter("hermes").take(FENCED.sub(r"<tool_call>\1</tool_call>", text), last=True)
    pieces = merged(found, cut_as_text=True)
    content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return content, tuple(piece for piece in pieces if isinstance(piece, ToolCall))


def steps_of(texts: Sequence[str]) -> list[tuple[ToolCall, ...]]:
    return [calls for text in texts if (calls := parsed(text)[1])]


@dataclass(frozen=True)
class BfclTask(PlainTask):
    """Multi-turn cases of BFCL v4 in `bfcl-eval` with a first prompt that fits into num_tokens. The package's
    classes run the calls, and its checker judges state and results after every turn.

    value: sessions with only correct turns
    extra: turns: share of the turns that were done, within num_tokens and the package's limit of steps;
           turns_right: share of leading correct turns; calls: their number; valid_calls: share of them
           that their function accepted; same_calls: share of turns with the full cache's calls;
           cached: as in agents.AgentSessions; agreement_by_turn: 1 if all answers match the full cache's
    """

    speaker: Speaker
    category: str
    num_tokens: int
    max_new_tokens: int
    name: str
    seeded = False
    compares = True

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "package": version("bfcl-eval"),
            "template": getattr(self.speaker.tokenizer, "chat_template", None),
            "num_tokens": self.num_tokens,
            "max_new_tokens": self.max_new_tokens,
        }

    @cached_property
    def cases(self) -> dict[str, BfclCase]:
        """By id."""
        return load_cases(self.category)

    @cached_property
    def _items(self) -> list[Item]:
        """Sessions by their first prompt, with room for the longest session."""
        prompts = {name: self.prompt(case, case.turn(0), 0) for name, case in self.cases.items()}
        return [
            Item(prompt, max_new_tokens=self.num_tokens - len(prompt), payload=name)
            for name, prompt in prompts.items()
            if len(prompt) + self.max_new_tokens <= self.num_tokens
        ]

    def prompt(self, case: BfclCase, messages: Sequence[Mapping[str, Any]], turn: int) -> tuple[int, ...]:
        """Return a conversation that ends in this turn, as token ids."""
        return tuple(render_chat(self.speaker, messages, tools=case.tools(turn)))

    def num_examples(self, wanted: int) -> int:
        return min(wanted, len(self._items))

    def item(self, seed: int, index: int) -> Item:
        item = self._items[index]
        case, prompt = self.cases[item.payload], list(item.prompt)
        num_system = num_system_tokens(self.speaker, prompt, case.turn(0), tools=case.tools(0))
        return replace(item, num_system=num_system)

    def converse(self, item: Item) -> BfclSession:
        return BfclSession(self, self.cases[item.payload])

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        case, turns = self.cases[item.payload], answer.turns
        assert answer.full is not None, "the task compares"
        num_turns, done = len(case.truth), int(sum(turn["done"] for turn in turns))
        ours, theirs = ([steps_of(texts) for texts in each.texts] for each in (answer, answer.full))
        right, calls = case.num_right(ours[:done]), sum(turn["calls"] for turn in turns)
        extra = {"turns": done / num_turns, "turns_right": right / num_turns, "calls": calls}
        called = [(a, b) for a, b in zip_longest(ours, theirs) if a or b]
        if called:
            extra["same_calls"] = sum(a == b for a, b in called) / len(called)
        if calls:
            extra["valid_calls"] = sum(turn["accepted"] for turn in turns) / calls
        if len(turns) > 1:
            extra["cached"] = cached_share(turns[1:])
        return TaskScore(
            float(right == num_turns),
            1,
            extra=extra,
            cached_by_turn=tuple(cached_share([turn]) for turn in turns),
            agreement_by_turn=tuple(float(a == b) for a, b in zip_longest(answer.texts, answer.full.texts)),
        )


def bfcl_task(name: str, llm: LLM, options: TaskOptions) -> BfclTask:
    """Raises: InvalidArgumentError for a missing package, a model with another format of calls, or cases that
    are all too long."""
    category = name.partition(":")[2] or BFCL_CATEGORIES[0]
    require(
        HERMES.opens[0] in str(llm.tokenizer.chat_template),
        f"task {name} needs a chat template that writes tool calls as Hermes and Qwen do "
        f"({HERMES.opens[0]}), and that of {llm.loaded.facts.name} does not; take another model.",
    )
    task = BfclTask(llm.loaded, category, options.num_tokens, options.max_new_tokens or MAX_NEW_TOKENS, name)
    require(
        task.num_examples(1) > 0,
        f"num_tokens is {task.num_tokens}, and no case of {name} fits into it with {task.max_new_tokens} new "
        "tokens; raise num_tokens.",
    )
    return task
