"""Time of long prompts: compressed, computed sparsely, or made of reused chunks.

python -m benchmarks prompt_time --model DIR --lengths 4096 --policies "auto,shares(kvzip)"
python -m benchmarks prefill --model MODEL --text FILE --lengths 8000,32000
python -m benchmarks chunks --model MODEL --text FILE
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, product
from statistics import median
from typing import Any

from benchmarks.runner import ONE_TOKEN, TextPlan, case, ratios, timed
from kvreclaim.bench.common import Row, alternate
from kvreclaim.bench.plans import KERNELS
from kvreclaim.bench.systems.base import text_tokens
from kvreclaim.checks import require
from kvreclaim.chunks import WHOLE, Chunk, ChunkReuse, chunk_reuse_of
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression_settings import AUTO, FULL
from kvreclaim.config import DENSE
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.api.prompts import Piece
from kvreclaim.engine.request.outputs import RequestOutput
from kvreclaim.model.overrides import yarn
from kvreclaim.options import option

SCORED = replace(ONE_TOKEN, logprobs=0)
SINKS, RECENT = 4, 64
CHECKED = "pooled(alpha=0.5, first=256, layers=0, local=1)"
LOGPROB, SHARE = 0.01, 0.01
"""Most by which kernels may differ there: a block as near to the threshold may be read or not."""
COLD = "cold"
OFF = 1e-3
"""Most by which a log-probability may differ from the whole prompt's, in fp32, where all is computed anew."""


@dataclass(frozen=True, kw_only=True)
class PromptTimePlan(TextPlan):
    """Every policy at every budget and length beside the full cache."""

    policies: tuple[str, ...] = option((AUTO,), "Policies, comma-separated.")
    budgets: tuple[float, ...] = option((0.2, 0.1), "Shares of the prompt that stay, comma-separated.")
    lengths: tuple[int, ...] = option((4096,), "Tokens of the prompts, comma-separated.")
    chunk: int = option(2048, "Tokens of a prompt that one step computes.", low=1)
    rounds: int = option(3, "Timed rounds.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for length, share in product(self.lengths, self.budgets):
            require(
                share * length > SINKS + RECENT and share < 1,
                f"--budgets has {share:g} of {length:,} tokens; pass shares below 1 of more than "
                f"{SINKS + RECENT} tokens.",
            )


@case(
    "time of a prompt",
    {
        "policy": "{policy}",
        "prompt": "{length:,}",
        "stays": "{budget:.0%}",
        "full cache, s": "{full_s:.2f}",
        "compressed, s": "{seconds:.2f}",
        "compressed / full": "{ratio:.2f}",
    },
)
def prompt_time(plan: PromptTimePlan) -> Iterator[Row]:
    """Time of a prompt that is compressed, over that of the same prompt with the full cache, interleaved.

    A request computes two tokens: the pass at a prompt's end runs before the second. Prefix caching is off.
    """
    longest = max(plan.lengths)
    llm = LLM(
        plan.model,
        dtype=plan.dtype,
        max_num_seqs=1,
        max_model_len=longest + 2,
        max_num_batched_tokens=plan.chunk,
        enable_prefix_caching=False,
    )
    tokens = text_tokens(plan.text, longest, llm.loaded)
    cells = tuple(product(plan.policies, plan.budgets))
    for length in plan.lengths:
        runs = {(FULL, 1.0): partial(prompt_s, llm, tokens[:length], None)}
        for policy, share in cells:
            settings = CompressionConfig(policy, int(share * length), sinks=SINKS, recent=RECENT)
            runs[policy, share] = partial(prompt_s, llm, tokens[:length], settings)
        alternate(runs, 1)
        found = alternate(runs, plan.rounds)
        full = found[FULL, 1.0]
        for policy, share in cells:
            yield {
                "length": length,
                "policy": policy,
                "budget": share,
                "full_s": median(full),
                "seconds": median(found[policy, share]),
                "ratio": median(ratios(found[policy, share], full)),
            }


def prompt_s(llm: LLM, prompt: list[int], settings: CompressionConfig | None) -> float:
    """Seconds. Raises: AssertionError where a pass did not run."""
    passes = llm.engine.totals.compactions
    params = replace(ONE_TOKEN, max_tokens=2)
    elapsed_s, _ = timed(llm, {"prompt_token_ids": prompt}, params, settings)
    assert (llm.engine.totals.compactions > passes) == (settings is not None), "passes ran, or did not run"
    return elapsed_s


@dataclass(frozen=True, kw_only=True)
class PrefillPlan(TextPlan):
    """Every method at every length beside dense, in turns, of which medians are taken."""

    methods: tuple[str, ...] = option(
        (
            "pooled",
            "pooled(alpha=0.3)",
            "a_shape(local=2048)",
            "vertical_slash(vertical=1000, slash=2048)",
            "block_sparse(top=32)",
        ),
        "Ways of sparse prefill, comma-separated.",
    )
    lengths: tuple[int, ...] = option((8192, 16384, 32768), "Tokens of the prompts, comma-separated.")
    kernels: str = option("auto", KERNELS)
    rounds: int = option(3, "Timed rounds.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.methods), "--methods names none; pass for example pooled,a_shape.")
        require(
            bool(self.lengths) and min(self.lengths, default=0) >= 1,
            f"--lengths are {self.lengths}; pass tokens, such as 8192,16384.",
        )


class Prompts:
    """One engine, and a prompt of each length. Raises: InvalidArgumentError for a text that is too short."""

    def __init__(self, plan: PrefillPlan) -> None:
        config = json.loads((plan.model / "config.json").read_text(encoding="utf-8"))
        overrides = yarn(config["max_position_embeddings"], max(plan.lengths) + 1)
        self.stretched = overrides["rope_parameters"]["factor"] if overrides else 1.0
        self.llm = LLM(
            plan.model,
            hf_overrides=overrides,
            dtype=plan.dtype,
            device="cpu",
            kernels=plan.kernels,
            max_num_seqs=1,
            max_model_len=max(plan.lengths) + 1,
            enable_prefix_caching=False,
        )
        self.tokens = text_tokens(plan.text, max(plan.lengths), self.llm.loaded)

    def run(self, length: int, method: str) -> tuple[float, float, int, float]:
        """Seconds, the share of the tokens that were read, the token that follows and its log-probability."""
        prompt = {"prompt_token_ids": self.tokens[:length], "sparse_prefill": method}
        elapsed_s, output = timed(self.llm, prompt, SCORED)
        (token,), share = output.outputs[0].token_ids, output.metrics.prefill_share
        (logprobs,) = output.outputs[0].logprobs or ({},)
        return elapsed_s, 1.0 if share is None else share, token, logprobs[token].logprob


@case(
    "sparse prefill",
    {
        "method": "{method}",
        "prompt": "{length:,}",
        "seconds": "{seconds:.2f}",
        "tokens/s": "{tokens_per_s:,.0f}",
        "dense / it": "{ratio:.2f}",
        "tokens read": "{read:.1%}",
    },
)
def prefill(plan: PrefillPlan) -> Iterator[Row]:
    """Sparse prefill beside dense: what reads everything first, then tokens/s and the share that is read."""
    check_kernels(plan)
    prompts = Prompts(plan)
    for length in plan.lengths:
        runs = {name: partial(prompts.run, length, name) for name in (DENSE, *plan.methods)}
        found = alternate(runs, plan.rounds)
        times = {name: [each[0] for each in results] for name, results in found.items()}
        for name, results in found.items():
            seconds = median(times[name])
            speedups = ratios(times[DENSE], times[name])
            yield {
                "stretched": prompts.stretched,
                "length": length,
                "method": name,
                "seconds": seconds,
                "tokens_per_s": length / seconds,
                "ratio": median(speedups),
                "ratios": speedups,
                "read": results[0][1],
                "same_token": results[0][2] == found[DENSE][0][2],
            }


def check_kernels(plan: PrefillPlan) -> None:
    """In fp32, of 2,048 tokens: native kernels answer as the reference's do, and a method that leaves out
    nothing is dense attention, to the bit."""
    small = replace(plan, dtype="float32", lengths=(2048,))
    ours, oracle = Prompts(small), Prompts(replace(small, kernels="reference"))
    _, share, token, logprob = ours.run(2048, CHECKED)
    _, same_share, same, near = oracle.run(2048, CHECKED)
    assert token == same, f"{CHECKED}: token {token} instead of {same}"
    assert abs(near - logprob) <= LOGPROB, f"{CHECKED}: {logprob} instead of {near}"
    assert abs(share - same_share) <= SHARE, f"{CHECKED} reads {share} instead of {same_share}"
    assert ours.run(2048, "pooled(alpha=0)")[2:] == ours.run(2048, DENSE)[2:], "alpha=0 is not dense"


@dataclass(frozen=True, kw_only=True)
class ChunksPlan(TextPlan):
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
    kernels: str = option("auto", KERNELS)
    rounds: int = option(5, "Timed rounds.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.reuse), "--reuse names none; pass for example change,none.")


class Documents:
    """A head, chunks and a question, and engines that have the chunks in their cache or nothing."""

    def __init__(self, plan: ChunksPlan) -> None:
        total = plan.num_chunks * plan.chunk_tokens + plan.head + plan.question
        options: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": total + 1, "kernels": plan.kernels}
        self.llm = LLM(plan.model, dtype=plan.dtype, device="cpu", **options)
        self.bare = self.llm.sibling(**options, enable_prefix_caching=False)
        tokens = text_tokens(plan.text, total, self.llm.loaded)
        cuts = [plan.head + n * plan.chunk_tokens for n in range(plan.num_chunks + 1)]
        self.head, self.question = tokens[: plan.head], tokens[cuts[-1] :]
        self.chunks = [tokens[a:b] for a, b in pairwise(cuts)]
        self._num_run = 0

    def run(self, how: str) -> tuple[float, RequestOutput]:
        """Seconds to the first token of the chunks in another order than in the run before. how: whole, cold
        (chunks are reused that are not computed yet), or a way of reusing them."""
        self._num_run += 1
        at = self._num_run % len(self.chunks)
        order = self.chunks[at:] + self.chunks[:at]
        if how == WHOLE:
            return self._timed(self.bare, [*self.head, *chain(*order), *self.question], None)
        if how == COLD:
            self.llm.engine.reset_prefix_cache()
        pieces = [self.head, *map(Chunk, order), self.question]
        return self._timed(self.llm, pieces, ChunkReuse() if how == COLD else chunk_reuse_of(how))

    def _timed(self, llm: LLM, prompt: Any, how: ChunkReuse | None) -> tuple[float, RequestOutput]:
        elapsed_s, output = timed(llm, {"prompt": prompt, "chunk_reuse": how} if how else prompt, SCORED)
        assert output.metrics.num_gone_tokens == 0, "chunks have left the cache"
        return elapsed_s, output


@case(
    "chunks out of place",
    {
        "chunks": "{way}",
        "prompt": "{tokens:,}",
        "first token s": "{seconds:.3f}",
        "whole / it": "{ratio:.2f}",
        "tokens reused": "{reused:.1%}",
    },
)
def chunks(plan: ChunksPlan) -> Iterator[Row]:
    """Chunks that are reused out of place: what equals the whole prompt first, then time to first token."""
    check_share_of_one(plan)
    documents = Documents(plan)
    documents.run(COLD)
    found = alternate({way: partial(documents.run, way) for way in (WHOLE, COLD, *plan.reuse)}, plan.rounds)
    times = {name: [each[0] for each in results] for name, results in found.items()}
    for name, results in found.items():
        metrics, speedups = results[0][1].metrics, ratios(times[WHOLE], times[name])
        yield {
            "way": name,
            "tokens": metrics.num_prompt_tokens,
            "seconds": median(times[name]),
            "ratio": median(speedups),
            "ratios": speedups,
            "reused": metrics.num_reused_tokens / metrics.num_prompt_tokens,
        }


def check_share_of_one(plan: ChunksPlan) -> None:
    """In fp32, of short chunks: with all computed anew the first token is as likely as behind the whole
    prompt."""
    documents = Documents(replace(plan, dtype="float32", chunk_tokens=min(128, plan.chunk_tokens)))
    pieces: list[Piece] = [documents.head, *map(Chunk, documents.chunks), documents.question]
    whole = [*documents.head, *chain(*documents.chunks), *documents.question]
    anew = {"prompt": pieces, "chunk_reuse": ChunkReuse(share=1.0)}
    (near,) = documents.llm.generate(anew, SCORED)
    (true,) = documents.bare.generate([whole], SCORED)
    (found,), (expected,) = (out.outputs[0].logprobs or ({},) for out in (near, true))
    assert found.keys() == expected.keys(), f"token {list(found)} instead of {list(expected)}"
    off = max(abs(found[token].logprob - expected[token].logprob) for token in found)
    assert off <= OFF, f"all computed anew is off by {off:.1e}"
