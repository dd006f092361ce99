"""What n-gram drafts bring on real text: tokens per second against decoding without, in turns.

scripts/ngram_speed.py --batch 1 8

Prompts are pieces of Python's documentation that are to be continued, or said again.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

from kvreclaim import LLM, real_model
from kvreclaim.bench.common import alternate
from kvreclaim.bench.lossless.drawing import Drawn, documentation, draw

AGAIN = "\n\nOnce more, the same text, word for word:\n\n"
FIRST = 16
"""Tokens of the text that are given again."""


def prompts(llm: LLM, kind: str, batch: int, num_tokens: int) -> list[list[int]]:
    pieces = documentation(llm, num_tokens, batch)
    if kind == "continue":
        return pieces
    again = llm.tokenizer.encode(AGAIN, add_special_tokens=False)
    return [piece + again + piece[:FIRST] for piece in pieces]


def describe(mine: list[Drawn], plain: list[Drawn]) -> str:
    ratio = statistics.median(one.rate / other.rate for one, other in zip(mine, plain, strict=True))
    drafted, accepted = sum(one.drafted for one in mine), sum(one.accepted for one in mine)
    equal = all(one.tokens == other.tokens for one, other in zip(mine, plain, strict=True))
    return f"{ratio:.2f} x plain, accepted {accepted / max(1, drafted):.2f} of {drafted}, equal {equal}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--drafts", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--num-tokens", type=int, default=1500, help="of each text")
    parser.add_argument("--drawn", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = real_model()
    if model is None:
        raise SystemExit("the real model is not there: run `kvreclaim fetch`")
    blocks = max(args.batch) * 4 * (args.num_tokens // 16 + 16)
    engines = {0: LLM(model, device="cpu", num_blocks=blocks)}
    for count in args.drafts:
        how = {"method": "ngram", "num_speculative_tokens": count}
        engines[count] = engines[0].sibling(speculative_config=how)
    for kind in ("continue", "again"):
        for batch in args.batch:
            asked = prompts(engines[0], kind, batch, args.num_tokens)
            runs = {count: partial(draw, llm, asked, None, args.drawn) for count, llm in engines.items()}
            drawn = alternate(runs, args.rounds)
            for count in args.drafts:
                told = describe(drawn[count], drawn[0])
                print(f"{kind:>8} batch {batch} drafts {count}: {told}", flush=True)


if __name__ == "__main__":
    main()
