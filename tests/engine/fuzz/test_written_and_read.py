"""Blocks written under any policy and read under any other: warm is as cold.

One request answers under the writer's policy; another one goes on with its prompt and answer under the
reader's, and hits what may be hit.
"""

from __future__ import annotations

import pytest
from operations import POLICIES, Ask, Reset, Setup, Step
from world import World

READERS = (
    None,
    "knorm",
    "snapkv(window=3)",
    "h2o",
    "quest",
    "paged_eviction",
    "ada_kv(snapkv(window=2), alpha=0)",
    "streaming_llm(positions=cache)",
    "prompt-norm",
    "shares(kvzap)",
)
"""One for each way of compressing, of seeing what was hit, and of treating positions; the last one hits only
what its like has written."""
WAYS = (None, "knorm", "quest", "paged_eviction", "ada_kv(snapkv(window=2), alpha=0)")


def written_and_read(world: World, writer: str | None, readers: tuple[str | None, ...]) -> None:
    """Each reader after a writer of its own."""
    for reader in readers:
        kind = "score" if writer == "oracle" else "greedy"
        world.do(Ask(cut=20, policy=writer, kind=kind, max_tokens=14))
        world.do(Step(40))
        world.do(Ask(turn_of=0, policy=reader, max_tokens=8))
        world.do(Step(40))
        assert not world.engine.has_unfinished
        world.do(Reset())


@pytest.mark.parametrize("writer", [None, *POLICIES])
def test_equal_numbers(writer, machine, oracle):
    world = World(machine, Setup(num_blocks=60, max_num_batched_tokens=16, shadow=False))
    try:
        written_and_read(world, writer, READERS)
        world.finish(oracle)
    finally:
        world.close()
    assert world.counts["compared"] == 2 * len(READERS)
    assert world.counts["hit tokens"] > 0


FORMATS = ("bf16", "fp16", "int8", "int8+int4", "fp8_e4m3", "int4", "turboquant4")


@pytest.mark.parametrize("kv_format", FORMATS)
def test_formats_that_round(kv_format, machine, oracle):
    """The shadow compares what is hit with what was once computed exactly, and every attention."""
    world = World(machine, Setup(kv_format=kv_format, num_blocks=60, max_num_batched_tokens=16))
    try:
        for i, writer in enumerate(WAYS):  # with three readers, others in the next format
            first = (i + FORMATS.index(kv_format)) % len(WAYS)
            written_and_read(world, writer, tuple((*WAYS, *WAYS)[first : first + 3]))
        world.finish(oracle)
    finally:
        world.close()
    assert world.counts["hits seen"] >= len(WAYS)
