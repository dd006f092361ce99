"""Reused chunks beside whole prompts, in one run: first the check that share=1 equals the whole prompt, then
seconds to the first token.

    python benchmarks/chunks.py --model MODEL --text FILE
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

from rich.table import Table

from kvreclaim.bench.common import Row, alternate, sheet
from kvreclaim.bench.plans import KERNELS, ModelPlan
from kvreclaim.bench.systems.base import text_tokens
from kvreclaim.checks import require
from kvreclaim.chunks import WHOLE, Chunk, ChunkReuse, chunk_reuse_of
from kvreclaim.cli.bench_options import Json, publish, ready, script
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.api.prompts import Piece
from kvreclaim.engine.request.outputs import RequestOutput
from kvreclaim.options import option
from kvreclaim.sampling_params import SamplingParams

SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0)
COLD = "cold"
OFF = 1e-3
"""Most by which a log-probability may differ from the whole prompt's, in fp32, where all is computed anew."""


@dataclass(frozen=True, kw_only=True)
class ChunksPlan(ModelPlan):
    """Every way of reusing the chunks of a prompt beside the whole prompt, in turns, of which medians are
    taken."""

    reuse: tuple[str, ...] = option(
        ("change", "question", "deviation", "first", "random", "none"),
        "Ways of reusing chunks, comma-separated.",
    )
    num_chunks: int = option(4, "Number of chunks.", low=1)
    chunk_tokens: int = option(1024, "Tokens per chunk.", low=32)
    head: int = option(32, "Tokens before the first chunk.", low=1)
    question: int = option(32, "Tokens after the last chunk.", low=1)
    text: Path | None = option(None, "UTF-8 text that is cut into chunks; else random tokens.")
    kernels: str = option("auto", KERNELS)
    rounds: int = option(5, "Timed rounds.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.reuse), "--reuse names none; pass for example change,none.")
        require(
            self.text is None or self.text.is_file(),
            f"--text is {str(self.text)!r}, which is no file; name one, or leave it out.",
        )


class Documents:
    """A head, chunks and a question, and engines that have the chunks in their cache or nothing."""

    def __init__(self, plan: ChunksPlan) -> None:
        total = plan.num_chunks * plan.chunk_tokens + plan.head + plan.question
        options: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": total + 1, "kernels": plan.kernels}
        self.llm = LLM(plan.model, dtype=plan.dtype, device="cpu", **options)
        self.bare = self.llm.sibling(**options, enable_prefix_caching=False)
        tokens = text_tokens(plan.text, total, self.llm.loaded)
        cuts = [plan.head + n * plan.chunk_tokens for n in range(plan.num_chunks + 1)]
        self.head, self.asked = tokens[: plan.head], tokens[cuts[-1] :]
        self.chunks = [tokens[a:b] for a, b in pairwise(cuts)]
        self._num_run = 0

    def run(self, how: str) -> tuple[float, RequestOutput]:
        """Seconds to the first token of the chunks in another order than in the run before. how: whole, cold
        (chunks are reused that nobody has computed yet), or a way of reusing them."""
        self._num_run += 1
        at = self._num_run % len(self.chunks)
        order = self.chunks[at:] + self.chunks[:at]
        if how == WHOLE:
            return self._timed(self.bare, [*self.head, *chain(*order), *self.asked], None)
        if how == COLD:
            self.llm.engine.reset_prefix_cache()
        pieces = [self.head, *map(Chunk, order), self.asked]
        return self._timed(self.llm, pieces, ChunkReuse() if how == COLD else chunk_reuse_of(how))

    def _timed(self, llm: LLM, prompt: Any, how: ChunkReuse | None) -> tuple[float, RequestOutput]:
        started = perf_counter()
        (output,) = llm.generate(prompt if how is None else {"prompt": prompt, "chunk_reuse": how}, SAMPLING)
        elapsed_s = perf_counter() - started
        assert output.error is None, f"{how}: {output.error}"
        assert output.metrics.num_gone_tokens == 0, "chunks have left the cache"
        return elapsed_s, output


def run(plan: ChunksPlan) -> list[Row]:
    """A row per way. Raises: AssertionError where computing all anew is not the whole prompt."""
    check(plan)
    documents = Documents(plan)
    names = (WHOLE, COLD, *plan.reuse)
    documents.run(COLD)
    runs: dict[str, Callable[[], tuple[float, RequestOutput]]]
    runs = {name: partial(documents.run, name) for name in names}
    found = alternate(runs, plan.rounds)
    rows: list[Row] = []
    for name in names:
        seconds = [each[0] for each in found[name]]
        metrics = found[name][0][1].metrics
        ratios = [whole[0] / own for whole, own in zip(found[WHOLE], seconds, strict=True)]
        rows.append(
            {
                **plan.facts(),
                "way": name,
                "tokens": metrics.num_prompt_tokens,
                "seconds": median(seconds),
                "ratio": median(ratios),
                "ratios": ratios,
                "reused": metrics.num_reused_tokens / metrics.num_prompt_tokens,
            }
        )
    return rows


def check(plan: ChunksPlan) -> None:
    """In fp32, of short chunks: with all computed anew the first token is as likely as behind the whole
    prompt."""
    documents = Documents(replace(plan, dtype="float32", chunk_tokens=min(128, plan.chunk_tokens)))
    pieces: list[Piece] = [documents.head, *map(Chunk, documents.chunks), documents.asked]
    whole = [*documents.head, *chain(*documents.chunks), *documents.asked]
    anew = {"prompt": pieces, "chunk_reuse": ChunkReuse(share=1.0)}
    (near,) = documents.llm.generate(anew, SAMPLING)
    (true,) = documents.bare.generate([whole], SAMPLING)
    (said,), (wanted,) = (out.outputs[0].logprobs or ({},) for out in (near, true))
    assert said.keys() == wanted.keys(), f"token {list(said)} instead of {list(wanted)}"
    off = max(abs(said[token].logprob - wanted[token].logprob) for token in said)
    assert off <= OFF, f"all computed anew is off by {off:.1e}"


def chunks_table(rows: list[Row]) -> Table:
    columns = {
        "chunks": "{way}",
        "prompt": "{tokens:,}",
        "first token s": "{seconds:.3f}",
        "whole / it": "{ratio:.2f}",
        "tokens reused": "{reused:.1%}",
    }
    return sheet("chunks out of place", columns, rows)


@script
def app(plan: Annotated[ChunksPlan, ConfigOptions(config=ChunksPlan)], json_file: Json = None) -> None:
    """Chunks that are reused out of place: what equals the whole prompt first, then time to first token."""
    with ready(plan.threads):
        rows = run(plan)
        publish(rows, [chunks_table(rows)], json_file)


if __name__ == "__main__":
    app()
