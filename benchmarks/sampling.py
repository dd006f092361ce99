"""Decode steps by a grammar, and of drawn tokens.

python -m benchmarks structured --threads 1 --model models/qwen2.5-coder-0.5b-instruct
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from time import process_time

import numpy as np

from benchmarks.runner import case, ratios
from kvreclaim.bench.common import Row, alternate, seconds
from kvreclaim.bench.plans import ModelPlan
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.features.structured_outputs.grammar import OutputGrammar, composed
from kvreclaim.options import option
from kvreclaim.parsers.grammars import answer_grammar
from kvreclaim.parsers.lark import Lark
from kvreclaim.parsers.thinking import THINK, ThinkSpan
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.structured_outputs import StructuredOutputsParams

WARM_STEPS = 8
MASK_STEPS = 12
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["cat", "dog", "horse"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "List many animals as JSON, each with name, kind, age and tags.\n"


@dataclass(frozen=True, kw_only=True)
class StructuredPlan(ModelPlan):
    """A batch of sequences, with and without a grammar, greedy and drawn."""

    batch: int = option(8, "Sequences.", low=1)
    steps: int = option(16, "Steps of a timed slice.", low=1)
    rounds: int = option(7, "Timed rounds.", low=1)


@dataclass(frozen=True)
class Setting:
    """What sequences of a batch ask for, and beside which other case it is measured."""

    beside: str
    temperature: float = 0.0
    top_p: float = 1.0
    grammar: StructuredOutputsParams | None = None


def settings(plan: StructuredPlan) -> dict[str, Setting]:
    """By name; no grammar's output can end while it is measured."""
    most = WARM_STEPS + plan.steps * plan.rounds + MASK_STEPS
    schema = StructuredOutputsParams(json={"type": "array", "items": ITEM, "minItems": most})
    span = ThinkSpan(THINK, begun=True)
    thought = composed(answer_grammar(Lark({}), None, span, harmony=False, structured=True), schema)
    return {
        "greedy": Setting("greedy"),
        "schema": Setting("greedy", grammar=schema),
        "reasoning": Setting("greedy", grammar=thought),
        "temperature": Setting("greedy", 1.0),
        "top_p": Setting("greedy", 1.0, 0.9),
        "top_p, schema": Setting("top_p", 1.0, 0.9, schema),
    }


@case(
    "a decode step by a grammar, or of drawn tokens",
    {
        "case": "{case}",
        "batch": "{batch}",
        "step, CPU ms": "{step_ms:.1f}",
        "x": "{ratio:.3f}",
        "beside": "{beside}",
        "masks, ms": "{mask_ms:.2f}",
        "at most": "{most_mask_ms:.2f}",
    },
)
def structured(plan: StructuredPlan) -> list[Row]:
    """Decode by a schema, or draw tokens, beside plain decoding; ratios are medians over the rounds.

    step_ms:   CPU time, which is wall time for one thread on an idle core
    reasoning: text in front of the schema, which the model does not end
    mask_ms:   of all sequences' masks, one after the other: the median of steps that are not timed;
               most_mask_ms: the longest
    """
    llm = LLM(
        plan.model, dtype=plan.dtype, num_blocks=64 * plan.batch, max_num_seqs=plan.batch, max_model_len=1024
    )
    given = settings(plan)
    engines = {name: begun(llm.sibling(), plan, case) for name, case in given.items()}
    found = alternate(
        {name: partial(cpu_s, engine, plan.steps) for name, engine in engines.items()},
        plan.rounds,
    )
    masks = {name: masks_s(engine) for name, engine in engines.items() if given[name].grammar is not None}
    return [
        {
            "case": name,
            "beside": given[name].beside,
            "batch": plan.batch,
            "step_ms": 1e3 * median(own) / plan.steps,
            "ratio": median(ratios(own, found[given[name].beside])),
            "mask_ms": 1e3 * median(masks[name]) if name in masks else None,
            "most_mask_ms": 1e3 * max(masks[name]) if name in masks else None,
        }
        for name, own in found.items()
    ]


def begun(llm: LLM, plan: StructuredPlan, case: Setting) -> LLM:
    """An engine whose sequences have begun to answer."""
    params = SamplingParams(
        temperature=case.temperature,
        top_p=case.top_p,
        seed=0,
        max_tokens=900,
        ignore_eos=True,
        structured_outputs=case.grammar,
    )
    for number in range(plan.batch):
        llm.engine.add_request(f"{number}", llm.tokenizer.encode(f"{number}. {PROMPT}"), params)
    while not all(request.prompt_done for request in llm.engine.requests.values()):
        llm.engine.step()
    steps(llm, WARM_STEPS)
    return llm


def cpu_s(llm: LLM, count: int) -> float:
    """CPU seconds of some steps, all threads together: others may hold the cores."""
    started = process_time()
    steps(llm, count)
    return process_time() - started


def steps(llm: LLM, count: int) -> None:
    for _ in range(count):
        llm.engine.step()
    assert len(llm.engine.requests) == llm.engine.config.max_num_seqs, "an output has ended"


def masks_s(llm: LLM) -> list[float]:
    """Seconds for the masks of all sequences, in some steps."""
    words = np.zeros((llm.loaded.vocab_size + 31) // 32, dtype=np.uint32)
    rules = [request.sequences[0].rule for request in llm.engine.requests.values()]

    def masks() -> None:
        for rule in rules:
            assert isinstance(rule, OutputGrammar), "it follows a grammar"
            rule.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    times = []
    for _ in range(MASK_STEPS):
        times.append(seconds(masks))
        steps(llm, 1)
    return times
