"""The demo on a language model: codes in prose and perplexity as `kvreclaim eval` measures them, then many
conversations at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.corpora import prose
from kvreclaim.demo.toy import OnProgress, Row, generate_batch, label
from kvreclaim.engine.api.chat import render_chat
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.compare import evaluate
from kvreclaim.eval.passages import Passages
from kvreclaim.eval.plan import TaskOptions
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.sampling_params import SamplingParams

TASKS = ("needles", "perplexity:prose")
_SUMMARY = "What is this text about? Answer in a few sentences."
_TEMPLATE_TOKENS = 100
"""Room for the chat template and the question."""


@dataclass(frozen=True)
class RealPlan:
    """Sizes of this part of the demo.

    others:          policies in addition to the full cache and auto; auto runs the load
    num_tokens:      of a document with its questions, and with its continuation
    num_load_tokens: of a text under load
    pool_share:      blocks of the load's pool over what the full cache of all its requests would need
    chunk:           tokens of a step under load
    """

    others: tuple[str, ...] = ("query_mixture", "snapkv", "streaming_llm")
    fractions: tuple[float, ...] = (0.25, 0.1)
    num_tokens: int = 2048
    num_examples: int = 4
    num_load: int = 6
    num_load_tokens: int = 1536
    num_answer_tokens: int = 96
    pool_share: float = 0.4
    chunk: int = 512
    recent: int = 32
    block_size: int = 16

    @property
    def num_blocks(self) -> int:
        """Blocks of the load's pool."""
        whole = self.num_load * blocks_for(self.num_load_tokens + self.num_answer_tokens, self.block_size)
        return int(whole * self.pool_share)


def run_real(model: Path, plan: RealPlan, on_progress: OnProgress) -> dict[str, Any]:
    """Everything, on a model that chats. Returns: model, eval (its report), load (rows)."""
    longest = plan.num_tokens + plan.num_answer_tokens
    llm = LLM(
        model,  # twice the blocks, so that prompts stay for all settings
        num_blocks=2 * plan.num_examples * blocks_for(longest, plan.block_size),
        block_size=plan.block_size,
        max_model_len=longest,
        max_num_batched_tokens=longest,
    )
    on_progress("codes and text")
    best = llm.resolved(CompressionConfig()).policy
    grid = evaluate(
        llm,
        ["full", best, *plan.others],
        plan.fractions,
        TASKS,
        options=TaskOptions(num_tokens=plan.num_tokens, dialect="text"),
        num_examples=plan.num_examples,
        batch_size=plan.num_examples,
        recent=plan.recent,
    )
    load = []
    for fraction in (None, *plan.fractions):
        on_progress(f"load, {label('full' if fraction is None else best, fraction)}")
        load.append(_load(llm, plan, best, fraction))
    return {"model": llm.loaded.facts.name, "eval": grid, "load": load}


def _load(llm: LLM, plan: RealPlan, policy: str, fraction: float | None) -> Row:
    """Many conversations at once in a pool that the full cache of all of them does not fit."""
    llm = llm.sibling(num_blocks=plan.num_blocks, max_num_batched_tokens=plan.chunk)
    passages = Passages.of(llm.tokenizer, prose().evaluation)
    prompts = []
    for number in range(plan.num_load):
        passage = llm.tokenizer.decode(passages.window(number, plan.num_load_tokens - _TEMPLATE_TOKENS))
        content = f"Read this text.\n\n{passage}\n\n{_SUMMARY}"
        prompts.append(render_chat(llm.loaded, [{"role": "user", "content": content}]))
    params = SamplingParams(temperature=0.0, max_tokens=plan.num_answer_tokens, ignore_eos=True)
    config = None
    if fraction is not None:  # in whole blocks
        budget = int(plan.num_load_tokens * fraction) // plan.block_size * plan.block_size
        config = CompressionConfig(policy, budget, recent=plan.recent)
    name = "full" if fraction is None else policy
    return generate_batch(llm, prompts, [params] * len(prompts), config, name, fraction)[1]
