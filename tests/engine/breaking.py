"""Requests of every kind, and a model whose passes fail."""

from __future__ import annotations

import tiny
from settings import small

from kvreclaim import SamplingParams

POISON = 271
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, logprobs=1)
MANY = SamplingParams(n=2, temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)
POLICIES = (None, "h2o", "snapkv", "tova", "quest", "ada_kv", "streaming_llm")
"""Policies that use every store that a pass adds to: attention mass, queries, digests, head tables."""


def config(policy):
    if policy == "quest":
        return small(policy, budget=32, sinks=0, recent=1)
    if policy == "ada_kv":
        return small(policy, budget=32, interval=16)
    return small(policy) if policy else None


def every_kind(num_tokens=50):
    """(prompt, parameters, compression) of requests of every kind."""
    prompts = [[t for t in p if t != POISON] for p in tiny.prompts((num_tokens,) * len(POLICIES), seed=3)]
    params = [GREEDY, SAMPLED, GREEDY, SAMPLED, MANY, GREEDY, MANY]
    return list(zip(prompts, params, [config(p) for p in POLICIES], strict=True))


def answers(outputs):
    return [[(o.token_ids, o.finish_reason) for o in out.outputs] for out in outputs]


def run(llm, requests):
    prompts, params, configs = (list(column) for column in zip(*requests, strict=True))
    return llm.generate(prompts, params, configs)


class Breaking:
    """Raises in the last layer of passes that `should` names, when earlier layers have written theirs."""

    def __init__(self, llm, should) -> None:
        self.ids = None
        self.num_raised = 0
        self.should = should
        model = llm.loaded.model
        model.get_input_embeddings().register_forward_pre_hook(self._note)
        model.model.layers[-1].register_forward_pre_hook(self._break)

    def _note(self, module, arguments) -> None:
        self.ids = arguments[0][0].tolist()

    def _break(self, module, arguments) -> None:
        if self.should(self.ids):
            self.num_raised += 1
            raise RuntimeError("boom")


def break_every_third(llm) -> Breaking:
    """Make every third pass over several sequences fail, once it is nearly done."""
    forward, alone, counted = llm.engine.runner.forward, [], [0]

    def noted(step):
        alone[:] = [len(step) == 1]
        return forward(step)

    def should(ids):
        counted[0] += not alone[0]
        return not alone[0] and counted[0] % 3 == 0

    llm.engine.runner.forward = noted
    return Breaking(llm, should)
