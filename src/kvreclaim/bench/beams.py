"""Beam search beside transformers' own, in one run: the same outputs, then the time for them."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

from kvreclaim.beams import BeamSearchParams
from kvreclaim.bench.common import Row, seconds, sheet
from kvreclaim.bench.plans import BeamsPlan
from kvreclaim.bench.systems.base import random_prompts
from kvreclaim.engine.api.llm import LLM
from kvreclaim.memory.blocks import blocks_for

SCORES = 1e-3
"""Most by which equal outputs' scores may differ in fp32: sums of hundreds of log-probabilities."""


class BeamComparison:
    """The two systems in one dtype."""

    def __init__(self, plan: BeamsPlan, dtype: str, width: int) -> None:
        self.plan, self.width = plan, width
        blocks = blocks_for(plan.prompt + plan.max_tokens, 16)
        self.llm = LLM(
            plan.model,
            dtype=dtype,
            device="cpu",
            num_blocks=blocks + width * (blocks_for(plan.max_tokens, 16) + 1),
            enable_prefix_caching=False,
        )
        self.model: Any = AutoModelForCausalLM.from_pretrained(plan.model, dtype=getattr(torch, dtype)).eval()
        self.params = BeamSearchParams(
            beam_width=width, max_tokens=plan.max_tokens, num_return_sequences=width, ignore_eos=True
        )

    def ours(self, prompt: list[int]) -> list[tuple[list[int], float]]:
        (output,) = self.llm.beam_search(prompt, self.params)
        return [(each.token_ids, each.sequences_scores or 0.0) for each in output.outputs]

    @torch.inference_mode()
    def theirs(self, prompt: list[int]) -> list[tuple[list[int], float]]:
        ids = torch.tensor([prompt])
        self.model.generation_config.eos_token_id = None  # nothing ends an output before its length
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=self.width,
            num_return_sequences=self.width,
            max_new_tokens=self.plan.max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
        )
        return list(
            zip(made.sequences[:, len(prompt) :].tolist(), made.sequences_scores.tolist(), strict=True)
        )


def run(plan: BeamsPlan) -> list[Row]:
    """A row per width. Raises: AssertionError where the two find different outputs in fp32."""
    rows = []
    for width in plan.beams:
        exact = BeamComparison(plan, "float32", width)
        vocab = exact.llm.loaded.vocab_size
        prompts = random_prompts(plan.rounds + 1, plan.prompt, vocab, 1)
        for (ids, score), (want, expected) in zip(
            exact.ours(prompts[0]), exact.theirs(prompts[0]), strict=True
        ):
            assert ids == want, f"{width} beams: {ids} instead of {want}"
            assert abs(score - expected) < SCORES, f"{width} beams: score {score} instead of {expected}"
        both = BeamComparison(plan, plan.dtype, width)
        ours: list[float] = []
        theirs: list[float] = []
        for turn, prompt in enumerate(prompts):
            runs = [(ours, both.ours), (theirs, both.theirs)]
            for times, search in runs[:: 1 if turn % 2 else -1]:
                times.append(seconds(partial(search, prompt)))
        ours, theirs = ours[1:], theirs[1:]
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        stats = both.llm.engine.memory.stats()
        rows.append(
            {
                **plan.facts(),
                "beams": width,
                "prompt": plan.prompt,
                "max_tokens": plan.max_tokens,
                "ours_s": median(ours),
                "transformers_s": median(theirs),
                "ratio": median(ratios),
                "ratios": ratios,
                "peak_blocks": stats.peak_in_use,
                "unshared_blocks": width * blocks_for(plan.prompt + plan.max_tokens, 16),
                "copies_per_search": stats.cow_copies / (plan.rounds + 1),
            }
        )
    return rows


def beams_table(rows: list[Row]) -> Table:
    columns = {
        "beams": "{beams}",
        "prompt": "{prompt}",
        "tokens": "{max_tokens}",
        "kvreclaim, s": "{ours_s:.2f}",
        "transformers, s": "{transformers_s:.2f}",
        "transformers / kvreclaim": "{ratio:.2f}",
        "most blocks": "{peak_blocks}",
        "unshared": "{unshared_blocks}",
        "copies": "{copies_per_search:.0f}",
    }
    return sheet("beam search", columns, rows)
