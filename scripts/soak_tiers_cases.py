"""The requests of the soak of the tiers: what each asks for, and what its answer may be."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvreclaim import LLM, CompressionConfig, SamplingParams

NUM_DOCUMENTS = 240
POLICIES = ("query_mixture", "knorm", "streaming_llm", "shares(streaming_llm, by=static)")
SALTS = (None, None, "red", "green")
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "spread_compression": False,
}
"""Of all engines: where a prompt is compressed depends on the chunks that a step may compute at most."""
TIE = 1e-4
"""Log-probabilities of two tokens that differ by less may change places with the order of sums, in fp32."""
AT_END = 0.25
"""Of the requests are compressed at their document's end, each document by one policy."""
REPEATS = 4
"""Times that each different request is sent, on average."""


@dataclass(frozen=True)
class Case:
    """One request. policy: None for the full cache; budget: of the policy; compress_prompt_at: tokens of a
    document that is compressed once for all who ask about it, so; greedy: with several outputs each is drawn
    from one token."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    seed: int
    salt: str | None
    policy: str | None
    budget: int
    compress_prompt_at: int | None
    greedy: bool

    def params(self, logprobs: int | None = None) -> SamplingParams:
        return SamplingParams(
            temperature=0.0 if self.greedy and self.n == 1 else 1.0,
            top_k=1 if self.greedy else 0,
            max_tokens=self.max_tokens,
            n=self.n,
            seed=self.seed,
            ignore_eos=True,
            logprobs=logprobs,
        )

    def compression(self) -> CompressionConfig | None:
        if self.policy is None:
            return None
        return CompressionConfig(self.policy, budget=self.budget, interval=16, sinks=2, recent=8)


def make_cases(seed: int, num_requests: int) -> list[Case]:
    """The same different requests for the same arguments."""
    rng = random.Random(seed)
    documents = [rng.choices(range(5, 200), k=rng.randrange(40, 300)) for _ in range(NUM_DOCUMENTS)]
    return [_case(rng, documents) for _ in range(max(1, num_requests // REPEATS))]


def _case(rng: random.Random, documents: list[list[int]]) -> Case:
    number = min(int(rng.paretovariate(0.5)) - 1, NUM_DOCUMENTS - 1)
    document = documents[number]
    at_end, is_part = rng.random() < AT_END, rng.random() < 0.5
    prompt = document[: rng.randrange(20, len(document) + 1)] if is_part and not at_end else document
    tail = rng.choices(range(5, 200), k=rng.randrange(1 if at_end else 0, 40))
    policy = rng.choice(POLICIES) if rng.random() < 0.35 else None
    return Case(
        prompt=(*prompt, *tail),
        max_tokens=rng.randrange(1, 33),
        n=rng.choice((1, 1, 1, 1, 1, 2, 3)),
        seed=rng.randrange(1000),
        salt=rng.choice(SALTS),
        policy=POLICIES[number % len(POLICIES)] if at_end else policy,
        budget=48 if at_end else rng.choice((32, 48, 80)),
        compress_prompt_at=len(document) if at_end else None,
        greedy=rng.random() < 0.85,
    )


class Oracle:
    """What an engine without tiers answers to each request alone; each is computed once."""

    def __init__(self, llm: LLM, cases: list[Case]) -> None:
        self.llm, self.cases = llm, cases
        self._known: dict[int, tuple[list[int], list[float]]] = {}

    def judge(self, number: int, found: list[list[int]]) -> str | None:
        """None: equal; "tie": another token first where two are equally likely; else what is wrong."""
        tokens, gaps = self._answer(number)
        verdict = None
        for output in found:
            if output != tokens:
                if len(output) != len(tokens):
                    return f"{len(output)} tokens, alone {len(tokens)}"
                first = next(
                    i for i, pair in enumerate(zip(output, tokens, strict=True)) if pair[0] != pair[1]
                )
                if gaps[first] > TIE:
                    return (
                        f"token {first} is {output[first]}, alone {tokens[first]}, {gaps[first]:.4f} likelier"
                    )
                verdict = "tie"
        return verdict

    def _answer(self, number: int) -> tuple[list[int], list[float]]:
        """Tokens, and for each by how much it was likelier than the next one."""
        if number not in self._known:
            case = self.cases[number]
            prompt = {
                "prompt_token_ids": list(case.prompt),
                "cache_salt": case.salt,
                "compress_prompt_at": case.compress_prompt_at,
            }
            (output,) = self.llm.generate(prompt, case.params(2), case.compression())
            assert output.error is None, output.error
            (first, *_) = output.outputs
            assert first.logprobs is not None, "they were asked for"
            each = [sorted(entry.logprob for entry in drawn.values()) for drawn in first.logprobs]
            self._known[number] = first.token_ids, [one[-1] - one[-2] for one in each]
        return self._known[number]
