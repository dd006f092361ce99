"""The requests of a soak: what each sends, and the answer that the same request gets alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from server import MODEL

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.eval.vocabulary import FILLER_WORDS

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
WORDS = ["GO", *FILLER_WORDS[::8]]
STOPS = ["shore", "fish sand", "grape", "."]
POLICIES = ["query_mixture", "knorm", "streaming_llm", "full"]
BAD: list[dict[str, Any]] = [
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"temperature": 1e9},
    {"top_p": -1},
    {"nonesuch": 1},
    {"kv_compression": {"policy": "nonesuch"}},
    {"kv_compression": {"budget": 3}},
    {"kv_compression": {"stats": "/etc/passwd"}},
    {"stream": "perhaps"},
    {"logit_bias": {"x": 1}},
    {"cache_salt": 7},
    {"n": 10_000},
    {"model": "nonesuch"},
]


@dataclass(frozen=True)
class Case:
    """One HTTP request.

    leaves_after: events after which its client goes away (of a stream), or seconds (of a whole answer)
    status:       of a bad one, what it must be answered with
    """

    name: str
    path: str
    body: dict[str, Any]
    key: str
    leaves_after: float | None = None
    status: int = 200

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def greedy(self) -> bool:
        return self.body.get("temperature") == 0


@dataclass
class Seen:
    """What a client got: by output its text and why it ended; the counts of its usage."""

    status: int = 0
    first_s: float | None = None
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    num_prompt: int | None = None
    num_generated: int | None = None
    complete: bool = False
    left: bool = False
    problem: str | None = None


def make_cases(seed: int, count: int, keys: tuple[str, ...], *, compress: bool) -> list[Case]:
    """The same cases for the same arguments."""
    rng = random.Random(seed)
    stems = [" ".join(rng.choices(WORDS, k=rng.randrange(20, 120))) for _ in range(8)]
    return [_case(rng, f"case {index}", stems, keys, compress=compress) for index in range(count)]


def _case(rng: random.Random, name: str, stems: list[str], keys: tuple[str, ...], *, compress: bool) -> Case:
    path = rng.choice([COMPLETIONS, CHAT, MESSAGES])
    body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.randrange(1, 64), **_prompt(rng, path, stems)}
    if rng.random() < 0.5:
        body["stream"] = True
        if path != MESSAGES:
            body["stream_options"] = {"include_usage": True}
    body |= _sampling(rng, path)
    if rng.random() < 0.3:
        body["cache_salt"] = rng.choice(["red", "green"])
    if compress and rng.random() < 0.4:
        sizes = {"budget": rng.choice([24, 40, 64]), "interval": rng.choice([16, 24])}
        body["kv_compression"] = {"policy": rng.choice(POLICIES), **sizes, "sinks": 2, "recent": 8}
    key, luck = rng.choice(keys), rng.random()
    if luck < 0.1:
        change = rng.choice(BAD)
        return Case(name, path, body | change, key, status=404 if "model" in change else 400)
    leaves = None
    if luck < 0.25:
        leaves = rng.randrange(0, 12) if body.get("stream") else rng.random() * 0.2
    return Case(name, path, body, key, leaves)


def _prompt(rng: random.Random, path: str, stems: list[str]) -> dict[str, Any]:
    def text() -> str:
        tail = rng.choices(WORDS, k=rng.randrange(1, 40))
        return " ".join([rng.choice(stems), *tail] if rng.random() < 0.6 else tail)

    if path == COMPLETIONS:
        kind = rng.random()
        if kind < 0.15:
            return {"prompt": [text() for _ in range(rng.randrange(2, 4))]}
        ids = [rng.randrange(5, 200) for _ in range(rng.randrange(1, 150))]
        return {"prompt": ids if kind < 0.3 else text()}
    turns = ["user", "assistant", "user"] if rng.random() < 0.3 else ["user"]
    return {"messages": [{"role": role, "content": text()} for role in turns]}


def _sampling(rng: random.Random, path: str) -> dict[str, Any]:
    drawn: dict[str, Any] = {"temperature": 0}
    if rng.random() < 0.25:
        drawn = {"temperature": rng.choice([0.7, 1.5]), "seed": rng.randrange(1000)}
        drawn["top_p"] = rng.choice([0.9, 1.0])
        if path != MESSAGES:
            drawn["n"] = rng.randrange(1, 5)
    if rng.random() < 0.4:
        drawn["ignore_eos"] = True
    if rng.random() < 0.3:
        drawn["stop_sequences" if path == MESSAGES else "stop"] = rng.sample(STOPS, rng.randrange(1, 3))
    if rng.random() < 0.15:
        drawn["repetition_penalty"] = 1.2
    if rng.random() < 0.1:
        drawn["logit_bias"] = {str(rng.randrange(5, 200)): 3.0}
    return drawn


def expected(case: Case, llm: LLM) -> Seen:
    """The answer to a greedy case, alone on an engine of its own, in the words of its dialect."""
    body = case.body
    given = body.get("kv_compression")
    params = SamplingParams(
        temperature=0.0,
        max_tokens=body["max_tokens"],
        stop=body.get("stop") or body.get("stop_sequences"),
        ignore_eos=body.get("ignore_eos", False),
        repetition_penalty=body.get("repetition_penalty", 1.0),
        logit_bias={int(token): bias for token, bias in body.get("logit_bias", {}).items()} or None,
    )
    seen = Seen(status=200, num_prompt=0, num_generated=0, complete=True)
    for index, prompt in enumerate(_prompts(body)):
        output = llm.generate(prompt, params, CompressionConfig(**given) if given else None)[0]
        seen.texts[index] = output.outputs[0].text
        seen.reasons[index] = _reason(case.path, output.outputs[0])
        seen.num_prompt += output.metrics.num_prompt_tokens
        seen.num_generated += output.metrics.num_generated_tokens
    return seen


def _prompts(body: dict[str, Any]) -> list[Any]:
    """The demo model's template joins the messages with spaces."""
    if "messages" in body:
        return [" ".join(message["content"] for message in body["messages"])]
    several = isinstance(body["prompt"], list) and isinstance(body["prompt"][0], str)
    return body["prompt"] if several else [body["prompt"]]


def _reason(path: str, output: Any) -> str:
    if path != MESSAGES:
        return output.finish_reason
    if isinstance(output.stop_reason, str):
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens"}[output.finish_reason]
