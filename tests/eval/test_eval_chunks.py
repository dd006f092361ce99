"""Ways of reusing chunks as an axis of the grid."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from guess import SMALL, Guess

from kvreclaim import LLM, Chunk, ChunkReuse
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import Answer, evaluate
from kvreclaim.eval.plan import EvalPlan

RANDOM = "random(share=0.5, seed=3)"


@dataclass(frozen=True)
class InChunks(Guess):
    """The prompt is a head of 6 tokens, two chunks and a tail of 4."""

    name: str = "in chunks"

    def item(self, seed, index):
        item = super().item(seed, index)
        end = len(item.prompt) - 4
        return replace(item, chunks=((6, 40), (40, end)))


@pytest.fixture(scope="module")
def llm(tiny_dir):
    return LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=120, max_num_batched_tokens=128)


@pytest.fixture(scope="module")
def report(llm):
    settings = {**SMALL, "num_examples": 2}
    return evaluate(llm, ["full"], [0.5], [InChunks()], chunk_reuse=["whole", RANDOM, "none"], **settings)


def row(report, way):
    (found,) = [r for r in report.rows if r.chunk_reuse == way]
    return found


def test_a_cell_is_what_an_engine_says_that_reuses_chunks_so(llm, report):
    right = judged = 0
    for index in range(2):
        item = InChunks().item(0, index)
        prompt, (a, b), (c, d) = list(item.prompt), *item.chunks
        pieces = [prompt[:a], Chunk(prompt[a:b]), Chunk(prompt[c:d]), prompt[d:]]
        how = ChunkReuse(select="random", share=0.5, seed=3)
        (out,) = llm.score([{"prompt": pieces, "chunk_reuse": how}], [list(item.continuation)])
        outcome = InChunks().judge(item, Answer(tuple(out.predicted)))
        right, judged = right + outcome.points, judged + outcome.out_of
    found = row(report, RANDOM)
    assert (found.status, found.value) == ("ok", right / judged)
    assert found.name == f"full, {RANDOM}"


def test_what_was_reused_stands_beside_it(report):
    assert 0 < row(report, RANDOM).extra["reused"] < row(report, "none").extra["reused"] < 1
    assert "reused" not in row(report, "whole").extra


def test_tasks_without_chunks_are_refused_and_a_pool_without_room_is_an_error(llm):
    settings = {**SMALL, "num_examples": 1}
    found = evaluate(llm, ["full"], [0.5], [Guess()], chunk_reuse=["whole", "none"], **settings)
    assert [r.status for r in found.rows] == ["ok", "refused"]
    assert "this task has none" in found.rows[1].reason
    tight = llm.sibling(num_blocks=11)
    found = evaluate(tight, ["full"], [0.5], [InChunks()], chunk_reuse=["none"], **settings)
    assert [r.status for r in found.rows] == ["error"]
    assert "had left the pool" in found.rows[0].reason


@pytest.mark.parametrize("way", ["best", "random(share=2.0)", "random(0.5)", "first(size=3)"])
def test_an_unknown_way_is_refused_before_anything_runs(way):
    with pytest.raises(InvalidArgumentError, match=r"chunk.reuse"):
        EvalPlan(chunk_reuse=[way])
