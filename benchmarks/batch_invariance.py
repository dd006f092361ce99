"""The cost of --batch-invariant: a prompt of 512 tokens, and decoding 1 and 8 sequences, in turns without it.

python benchmarks/batch_invariance.py MODEL --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from kvreclaim import LLM, SamplingParams

PROMPT, TOKENS = 512, 32


def measured(llm: LLM, length: int, count: int, tokens: int) -> float:
    """Seconds for so many random prompts of a length, and tokens of answer each."""
    prompts = torch.randint(10, llm.loaded.vocab_size, (count, length)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    off = LLM(asked.model, dtype=asked.dtype, device="cpu", enable_prefix_caching=False, num_blocks=600)
    engines = {"off": off, "on": off.sibling(batch_invariant=True)}
    cases = {"prompt of 512": (PROMPT, 1, 1), "decode 1": (16, 1, TOKENS), "decode 8": (16, 8, TOKENS)}
    for case, (length, count, tokens) in cases.items():
        times: dict[str, list[float]] = {name: [] for name in engines}
        for round_number in range(asked.rounds + 1):
            for name, llm in engines.items():
                seconds = measured(llm, length, count, tokens)
                if round_number:  # the first one warms up
                    times[name].append(seconds)
        each = {name: statistics.median(found) for name, found in times.items()}
        computed = count * (length if tokens == 1 else tokens)
        rates = ", ".join(f"{name} {computed / seconds:.0f} tokens/s" for name, seconds in each.items())
        print(f"{case}: {rates}, time {each['on'] / each['off']:.2f} x")


if __name__ == "__main__":
    main()
