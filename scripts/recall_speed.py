"""What recall costs: tokens per second of a compressed cache with it and without, in turns.

scripts/recall_speed.py --policy snapkv --batch 1 4
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

from kvreclaim import LLM, CompressionConfig, real_model
from kvreclaim.bench.common import alternate
from kvreclaim.bench.lossless.drawing import draw
from kvreclaim.bench.systems.base import random_prompts

PLAIN = "no recall"
MODES = ("pass", "tokens:16", "tokens:4", "query")


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
    llm = LLM(model, device="cpu", num_blocks=blocks, kv_recall_size=2.0)
    configs = {
        mode: CompressionConfig(
            args.policy, args.budget, interval=128, recent=64, recall=None if mode == PLAIN else mode
        )
        for mode in (PLAIN, *MODES)
    }
    for batch in args.batch:
        prompts = random_prompts(batch, args.num_tokens, llm.loaded.vocab_size, seed=0)
        runs = {mode: partial(draw, llm, prompts, config, args.drawn) for mode, config in configs.items()}
        drawn = alternate(runs, args.rounds)
        for mode in MODES:
            pairs = zip(drawn[mode], drawn[PLAIN], strict=True)
            ratio = statistics.median(mine.rate / plain.rate for mine, plain in pairs)
            print(f"batch {batch} {mode:>10}: {ratio:.3f} of the tokens/s without", flush=True)


if __name__ == "__main__":
    main()
