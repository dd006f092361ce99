"""Teacher-forced look-ups and carries of query_mixture by number of centres, beside its rivals."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from kvreclaim import LLM, CompressionConfig, demo_model
from kvreclaim.demo.runs import DemoPlan
from kvreclaim.engine.calibration import calibrate
from kvreclaim.eval.chain import calibration_documents, carry_accuracy, lookup_accuracy
from kvreclaim.eval.example import Example
from kvreclaim.model.loader import hide_progress_bars

FRACTIONS = (0.25, 0.1)
RIVALS: tuple[tuple[str, dict[str, object]], ...] = (
    ("triattention", {}),
    ("triattention", {"use_trig": False}),
    ("knorm", {"keep": "large"}),
    ("streaming_llm", {}),
)


def measure(llm: LLM, examples: list[Example], config: CompressionConfig | None) -> str:
    """Look-ups (carries), means over the examples."""
    prompts, traces = [list(e.prompt) for e in examples], [list(e.trace) for e in examples]
    pairs = list(zip(examples, llm.score(prompts, traces, config), strict=True))
    look_ups = mean(lookup_accuracy(e, out.predicted) for e, out in pairs)
    return f"{look_ups:.3f} ({mean(carry_accuracy(e, out.predicted) for e, out in pairs):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=demo_model())
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--centers", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--prompt-tokens", type=int, default=DemoPlan().task.num_prompt_tokens)
    parser.add_argument("--trace-tokens", type=int, default=DemoPlan().task.num_trace_tokens)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more
    hide_progress_bars()
    task = replace(DemoPlan().task, num_prompt_tokens=args.prompt_tokens, num_trace_tokens=args.trace_tokens)
    plan = DemoPlan(task=task)
    llm = LLM(args.model, num_blocks=args.sequences * (plan.final_length // plan.block_size + 1))
    examples = [plan.task.sample(seed) for seed in range(args.sequences)]
    print(f"{'':44}{'look-ups (carries) at ' + ', '.join(f'{f:.0%}' for f in FRACTIONS)}")
    print(f"{'full':44}{measure(llm, examples, None)}")
    documents = calibration_documents(16, task=replace(task, num_decoys=6))
    settings = [(n, "query_mixture", {"value_norm": v}) for n in args.centers for v in (False, True)]
    for centers, policy, options in [*settings, *((1, *rival) for rival in RIVALS)]:
        stats = calibrate(llm.loaded, documents, num_centers=centers)
        found = [
            measure(
                llm,
                examples,
                CompressionConfig(
                    policy, plan.budget(f), recent=plan.recent, stats=stats, options=dict(options)
                ),
            )
            for f in FRACTIONS
        ]
        label = (
            f"{policy} C={centers} {options}" if policy == "query_mixture" else f"{policy} {options or ''}"
        )
        print(f"{label:44}{'  '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
