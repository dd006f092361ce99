"""What n-gram drafts bring on real text: tokens per second against decoding without, in turns.

scripts/ngram_speed.py --batch 1 8

Prompts are pieces of Python's documentation that are to be continued, or said again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pydoc_data.topics import topics

from kvreclaim import LLM, SamplingParams, real_model

AGAIN = "\n\nOnce more, the same text, word for word:\n\n"
FIRST = 16
"""Tokens of the text that are given again."""


def prompts(llm: LLM, kind: str, batch: int, num_tokens: int) -> list[list[int]]:
    encode = llm.tokenizer.encode
    text = encode("\n\n".join(topics[name] for name in sorted(topics)))
    step = (len(text) - num_tokens) // batch
    pieces = [text[n * step : n * step + num_tokens] for n in range(batch)]
    if kind == "continue":
        return pieces
    return [piece + encode(AGAIN, add_special_tokens=False) + piece[:FIRST] for piece in pieces]


def draw(llm: LLM, asked: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens per second from the end of the last prompt on, and all tokens."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [llm._add(prompt, params, None) for prompt in asked]
    while not all(request.prompt_done for request in requests):
        llm.engine.step()
    before = sum(request.sequences[0].num_generated for request in requests)
    started = time.perf_counter()
    while llm.engine.has_unfinished:
        llm.engine.step()
    seconds = time.perf_counter() - started
    said = [request.sequences[0].token_ids[len(request.prompt_token_ids) :] for request in requests]
    return (num_tokens * len(asked) - before) / seconds, said


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
    plain = LLM(model, device="cpu", num_blocks=blocks)
    engines = {
        count: plain.sibling(speculative_config={"method": "ngram", "num_speculative_tokens": count})
        for count in args.drafts
    }
    for kind in ("continue", "again"):
        for batch in args.batch:
            asked = prompts(plain, kind, batch, args.num_tokens)
            ratios: dict[int, list[float]] = {count: [] for count in engines}
            before = {
                c: (
                    e.engine.totals.speculation.num_draft_tokens,
                    e.engine.totals.speculation.num_accepted_tokens,
                )
                for c, e in engines.items()
            }
            equal = dict.fromkeys(engines, True)
            for _ in range(args.rounds):
                base, said = draw(plain, asked, args.drawn)
                for count, llm in engines.items():
                    rate, own = draw(llm, asked, args.drawn)
                    ratios[count].append(rate / base)
                    equal[count] &= own == said
            for count, llm in engines.items():
                totals = llm.engine.totals.speculation
                drafted = totals.num_draft_tokens - before[count][0]
                accepted = totals.num_accepted_tokens - before[count][1]
                ratio = statistics.median(ratios[count])
                print(
                    f"{kind:>8} batch {batch} drafts {count}: {ratio:.2f} x plain, "
                    f"accepted {accepted / max(1, drafted):.2f} of {drafted}, equal {equal[count]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
