"""The demo on a real language model: codes in real text, a conversation about it, and many at once."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.corpora import prose
from kvreclaim.demo.report import CodeQuestion, LoadRun, RealReport
from kvreclaim.demo.runs import OnProgress, generate_batch, load_figures
from kvreclaim.engine.api.chat import render_chat
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.compare import evaluate
from kvreclaim.eval.passages import Passages, woven
from kvreclaim.eval.plan import TaskOptions
from kvreclaim.eval.text.codes import draw_facts, fact_text
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.sampling_params import SamplingParams

TASKS = ("needles", "perplexity:prose")
_SUMMARY = "What is this text about? Answer in a few sentences."
_AROUND = 100


@dataclass(frozen=True)
class RealPlan:
    """Sizes of this part of the demo; the defaults take about two minutes on two cores.

    others:          policies in addition to the full cache and auto; auto runs the conversation and the load
    num_tokens:      of a document with its questions, and with its continuation
    num_talks:       texts that are talked about, each with a code in it
    num_load_tokens: of a text under load
    pool_share:      blocks of the load's pool over what the full cache of all its requests would need
    chunk:           tokens of a step under load
    """

    others: tuple[str, ...] = ("query_mixture", "snapkv", "streaming_llm")
    fractions: tuple[float, ...] = (0.25, 0.1)
    num_tokens: int = 2048
    num_examples: int = 4
    num_talks: int = 4
    num_talk_tokens: int = 2048
    num_load: int = 6
    num_load_tokens: int = 1536
    num_answer_tokens: int = 96
    pool_share: float = 0.4
    chunk: int = 512
    recent: int = 32
    block_size: int = 16

    @property
    def shares(self) -> tuple[float | None, ...]:
        """Shares to compare: None for the full cache, then the fractions."""
        return (None, *self.fractions)

    def budget(self, fraction: float | None, num_tokens: int) -> int | None:
        """Tokens of this share, in whole blocks."""
        if fraction is None:
            return None
        return int(num_tokens * fraction) // self.block_size * self.block_size


def run_real(model: Path, plan: RealPlan, on_progress: OnProgress) -> RealReport:
    """Everything, on a model that chats."""
    started = time.perf_counter()
    longest = max(plan.num_tokens, plan.num_talk_tokens) + plan.num_answer_tokens
    llm = LLM(
        model,  # twice the blocks, so that prompts stay for all settings
        num_blocks=2 * plan.num_examples * blocks_for(longest, plan.block_size),
        block_size=plan.block_size,
        max_model_len=longest,
        max_num_batched_tokens=longest,
    )
    on_progress("codes and text")
    options = TaskOptions(num_tokens=plan.num_tokens, dialect="text")
    best = llm.resolved(CompressionConfig()).policy
    grid = evaluate(
        llm,
        ["full", best, *plan.others],
        plan.fractions,
        TASKS,
        options=options,
        num_examples=plan.num_examples,
        batch_size=plan.num_examples,
        recent=plan.recent,
    )
    talks = Conversations(llm, plan, best)
    on_progress("a conversation")
    questions = talks.ask()
    load = []
    for fraction in plan.shares:
        on_progress(f"load, {label(best, fraction)}")
        load.append(talks.load(fraction))
    return RealReport(
        model=llm.loaded.facts.name,
        dtype=grid.header.dtype,
        device=grid.header.device,
        kernels=llm.engine.kernels,
        block_size=plan.block_size,
        num_blocks=talks.num_blocks,
        num_tokens=plan.num_tokens,
        num_talk_tokens=plan.num_talk_tokens,
        num_load_tokens=plan.num_load_tokens,
        rows=grid.rows,
        asked=questions,
        load=load,
        elapsed_s=time.perf_counter() - started,
    )


class Conversations:
    """Conversations about passages of prose with codes in them, with the full cache and under a policy.

    num_blocks: of the load's pool
    """

    def __init__(self, llm: LLM, plan: RealPlan, policy: str) -> None:
        self.llm = llm
        self.plan = plan
        self.policy = policy
        self.passages = Passages.of(llm.tokenizer, prose().evaluation)
        whole = plan.num_load * blocks_for(plan.num_load_tokens + plan.num_answer_tokens, plan.block_size)
        self.num_blocks = int(whole * plan.pool_share)

    def ask(self) -> list[CodeQuestion]:
        """Request the code of each text from the full cache and from ours; print answers as they arrive."""
        questions = []
        for number in range(self.plan.num_talks):
            text, (name, code) = self._text(number, self.plan.num_talk_tokens)
            question = f"What is the access code of {name}?"
            prompt = self._prompt(text, question)
            answers = {}
            for fraction in self.plan.shares:
                params = SamplingParams(temperature=0.0, max_tokens=24)
                out = self.llm.generate([prompt], params, self._compression(fraction, len(prompt)))[0]
                answers[label(self.policy, fraction)] = out.outputs[0].text.strip()
            questions.append(CodeQuestion(question=question, code=code, answers=answers))
        return questions

    def load(self, fraction: float | None) -> LoadRun:
        """Many conversations at once in a pool that the full cache of all of them does not fit."""
        plan = self.plan
        llm = self.llm.sibling(num_blocks=self.num_blocks, max_num_batched_tokens=plan.chunk)
        prompts = [
            self._prompt(self._text(number, plan.num_load_tokens)[0], _SUMMARY)
            for number in range(plan.num_load)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=plan.num_answer_tokens, ignore_eos=True)
        config = self._compression(fraction, plan.num_load_tokens)
        outputs, steps, figures = generate_batch(llm, prompts, [params] * len(prompts), config)
        return LoadRun(
            policy="full" if fraction is None else self.policy,
            fraction=fraction,
            budget=None if config is None else config.budget,
            num_requests=len(prompts),
            **figures,
            **load_figures(outputs, steps),
        )

    def _compression(self, fraction: float | None, num_tokens: int) -> CompressionConfig | None:
        budget = self.plan.budget(fraction, num_tokens)
        return None if budget is None else CompressionConfig(self.policy, budget, recent=self.plan.recent)

    def _prompt(self, text: str, question: str) -> list[int]:
        content = f"Read this text.\n\n{text}\n\n{question}"
        return render_chat(self.llm.loaded, [{"role": "user", "content": content}])

    def _text(self, number: int, num_tokens: int) -> tuple[str, tuple[str, str]]:
        """A passage with a code in it, what the code opens, and the code. num_tokens: with the chat template,
        which takes less than _AROUND"""
        rng = random.Random(f"talk:{number}")
        (fact,) = draw_facts(rng, 1)
        tokenizer = self.llm.tokenizer
        tokens = tokenizer.encode(f" {fact_text(*fact)}", add_special_tokens=False)
        passage = self.passages.window(number, num_tokens - _AROUND)
        return str(tokenizer.decode(woven(rng, passage, [tokens])[0])), fact


def label(policy: str, fraction: float | None) -> str:
    """Return the name of a column in the tables."""
    return "full" if fraction is None else f"{policy} {fraction:.0%}"
