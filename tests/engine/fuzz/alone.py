"""The same request alone, in an engine with room for everything and without a prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from lean import FIRST_SPECIAL

from kvreclaim import BeamSearchParams, SamplingParams, StructuredOutputsParams
from kvreclaim.engine.request.request import Request

if TYPE_CHECKING:
    from machine import Machine

NOISES = (1e-6,) * 8 + (1e-5,) * 8 + (1e-4,) * 4
LOGPROB = 1e-3
"""Most that a log-probability may be off."""
WORDS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!?"
"""The texts of the tokens: no grammar forces a part of one, which the tokenizer would take for another."""
EVEN, ODD = WORDS[:FIRST_SPECIAL:2], WORDS[1:FIRST_SPECIAL:2]
NESTED = f'start: (nest | OTHER)*\nnest: "1" (nest | OTHER)* "2"\nOTHER: /[{WORDS[3:20]}]/'


LIMITS = {
    "allowed": {"allowed_token_ids": list(range(0, FIRST_SPECIAL, 3))},
    "bad_words": {"bad_words": [f"{word} {word}" for word in WORDS[:FIRST_SPECIAL]]},
    "bias": {
        "logit_bias": {**dict.fromkeys(range(0, FIRST_SPECIAL, 2), 4.0), 8: -100.0},
        "presence_penalty": 2.0,
    },
    "pairs": {"structured_outputs": StructuredOutputsParams(regex=f"([{EVEN}][{ODD}])*")},
    "nested": {"structured_outputs": StructuredOutputsParams(grammar=NESTED)},
}
"""Sampling parameters by the name that an operation has for them."""


GRAMMARS = ("pairs", "nested")


def follows(limits: str | None, tokens: Sequence[int]) -> bool:
    """Whether an output's beginning is one that its grammar allows: by counting, without the grammar."""
    if limits == "pairs":
        return all(token % 2 == place % 2 for place, token in enumerate(tokens))
    if limits == "nested":
        depths = accumulate((token == 1) - (token == 2) for token in tokens)
        return all(1 <= token < 20 for token in tokens) and all(depth >= 0 for depth in depths)
    return True


@dataclass(frozen=True)
class Question:
    """All that an answer depends on, company aside."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    kind: str
    seed: int
    max_tokens: int
    stop: tuple[int, ...]
    salt: str | None
    policy: str | None
    budget: int
    interval: int
    chunk: int
    kernels: str
    compress_prompt_at: int | None = None
    max_len: int | None = None
    sparse: str | None = None
    verify: int = 0
    limits: str | None = None
    sinks: int = 1
    drop_spans: tuple[tuple[int, int], ...] = ()
    drop_at: int | None = None

    @property
    def as_alone(self) -> Question:
        """The question without what only drafts: it has the same answer."""
        return replace(self, salt=None, verify=0, policy=None if self.verify else self.policy)

    @property
    def beams(self) -> BeamSearchParams | None:
        if self.kind != "beams":
            return None
        width = 2 + self.seed
        return BeamSearchParams(
            beam_width=width,
            num_return_sequences=width,
            max_tokens=self.max_tokens,
            ignore_eos=True,
        )

    def params(self) -> SamplingParams:
        if self.beams is not None:
            return self.beams.sampling
        greedy = self.kind in ("greedy", "score", "prompt_logprobs")
        return SamplingParams(
            n=3 if self.kind == "many" else 1,
            temperature=0.0 if greedy else 1.0,
            seed=None if greedy else self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            stop_token_ids=list(self.stop) or None,
            logprobs=0,
            prompt_logprobs=0 if self.kind == "prompt_logprobs" else None,
            **LIMITS.get(self.limits, {}),
        )


@dataclass(frozen=True)
class Answer:
    """Tokens of each output with their log-probabilities, as far as they got; of a scored request the
    log-probabilities given to its continuation; the prompt's, from its second token on."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    prompt: tuple[float, ...]

    @classmethod
    def of(cls, request: Request) -> Answer:
        prompt = request.prompt_logprobs or []
        given = request.prompt_token_ids
        found = tuple(each[given[i]].logprob for i, each in enumerate(prompt) if each is not None)
        if request.scores is not None:
            scores = request.scores
            known = [(t, p) for t, p in zip(scores.predicted, scores.logprobs, strict=True) if t >= 0]
            return cls((tuple(t for t, _ in known),), (tuple(p for _, p in known),), found)
        outputs = request.output().outputs
        if request.beams is not None:
            found_all = [out for out in outputs if out.cumulative_logprob is not None]
            return cls(
                tuple(tuple(out.token_ids) for out in found_all),
                tuple((out.cumulative_logprob,) for out in found_all),
                (),
            )
        return cls(
            tuple(tuple(out.token_ids) for out in outputs),
            tuple(
                tuple(each[token].logprob for token, each in zip(out.token_ids, out.logprobs, strict=False))
                for out in outputs
            ),
            found,
        )

    def begins(self, whole: Answer) -> bool:
        """Whether it is the other one, as far as it goes."""
        numbers = [*zip(self.logprobs, whole.logprobs, strict=False), (self.prompt, whole.prompt)]
        return (
            len(self.tokens) <= len(whole.tokens)
            and all(a == b[: len(a)] for a, b in zip(self.tokens, whole.tokens, strict=False))
            and all(len(a) <= len(b) for a, b in numbers)
            and all(abs(x - y) <= LOGPROB for a, b in numbers for x, y in zip(a, b, strict=False))
        )

    def parts(self, question: Question) -> list[Answer]:
        """The parts that may be preempted one by one."""
        if question.kind != "many":
            return [self]
        pairs = zip(self.tokens, self.logprobs, strict=True)
        return [Answer((tokens,), (logprobs,), self.prompt) for tokens, logprobs in pairs]


class Oracle:
    """Answers are remembered. ties: questions whose answer hangs on the last bits of some number."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.known: dict[Question, Answer] = {}
        self.ties = 0
        self._others: dict[str, Oracle] = {}

    def of(self, family: str) -> Oracle:
        """The oracle of a machine of another family."""
        if family not in self._others:
            self._others[family] = Oracle(self.machine.of(family))
        return self._others[family]

    def learn(self, questions: Iterable[Question]) -> None:
        """Answer those that are not known yet, many in one engine that has room for all and shares nothing:
        one that differs from what is compared with it is then run alone."""
        new = {question for each in questions if (question := each.as_alone) not in self.known}
        ordered = sorted(new, key=repr)
        self.known.update(zip(ordered, self.machine.together(ordered), strict=True))

    def gives(self, question: Question, got: Answer) -> bool:
        """Whether the request alone has this answer, or would if its embeddings were off in their last bits:
        two logits or two scores may be as good as equal, and company changes the last bit of a sum. An output
        that was preempted has met company of its own."""
        question = question.as_alone
        self.learn([question])
        if got.begins(self.known[question]):
            return True
        self.known[question] = self.alone(question)
        if got.begins(self.known[question]):
            return True
        left = list(enumerate(got.parts(question)))
        for noise in (0.0, *NOISES):
            parts = (self.alone(question, noise) if noise else self.known[question]).parts(question)
            left = [(i, part) for i, part in left if not part.begins(parts[i])]
            if not left:
                self.ties += 1
                return True
        return False

    def alone(self, question: Question, noise: float = 0.0) -> Answer:
        return self.machine.together([question], noise)[0]
