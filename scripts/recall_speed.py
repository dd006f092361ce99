"""What recall costs: tokens per second of a compressed cache with it and without, in turns.

scripts/recall_speed.py --policy snapkv --batch 1 4
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from kvreclaim import LLM, CompressionConfig, SamplingParams, real_model

MODES = (None, "pass", "tokens:16", "tokens:4", "query")


def rate(llm: LLM, prompts: list[list[int]], config: CompressionConfig | None, num_tokens: int) -> float:
    """Tokens per second, from the end of the last prompt on."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [llm._add(prompt, params, config) for prompt in prompts]
    while not all(request.prompt_done for request in requests):
        llm.engine.step()
    before = sum(request.sequences[0].num_generated for request in requests)
    started = time.perf_counter()
    while llm.engine.has_unfinished:
        llm.engine.step()
    return (num_tokens * len(prompts) - before) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", default="snapkv")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--num-tokens", type=int, default=2500, help="of each prompt")
    parser.add_argument("--drawn", type=int, default=64)
    parser.add_argument("--budget", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = real_model()
    if model is None:
        raise SystemExit("the real model is not there: run `kvreclaim fetch`")
    blocks = max(args.batch) * 2 * (args.num_tokens // 16 + 8)
    llm = LLM(model, device="cpu", num_blocks=blocks, kv_cold_size=2.0)
    generator = torch.Generator().manual_seed(0)
    for batch in args.batch:
        shape = (batch, args.num_tokens)
        prompts = torch.randint(llm.loaded.vocab_size, shape, generator=generator).tolist()
        rates: dict[str | None, list[float]] = {mode: [] for mode in MODES}
        for _ in range(args.rounds):
            for mode in MODES:
                config = CompressionConfig(args.policy, args.budget, interval=128, recent=64, recall=mode)
                rates[mode].append(rate(llm, prompts, config, args.drawn))
        for mode in MODES:
            pairs = zip(rates[mode], rates[None], strict=True)
            ratio = statistics.median(mine / plain for mine, plain in pairs)
            print(f"batch {batch} {mode or 'no recall':>10}: {ratio:.3f} of the tokens/s without", flush=True)


if __name__ == "__main__":
    main()
