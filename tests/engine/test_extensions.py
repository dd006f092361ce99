"""Extensions are called at their points; an engine without features has none and runs no file of one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import tiny
from entered import PACKAGE, off, traced

from kvreclaim import SamplingParams
from kvreclaim.engine.extension import Extension, Extensions

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MOST_FILES = 42
"""Source files that a plain request runs through, from its prompt to its last token."""
PLAIN = {"_state", "rates", "metrics", "state", "counts"}
"""Parts that are plain data, which counters write to."""


class Counting(Extension):
    """Records its calls, in their order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.tokens = 0

    def begin_step(self) -> None:
        self.seen.append("begin_step")

    def attended(self, step) -> None:
        self.tokens += sum(item.num_tokens for item in step)
        self.seen.append("attended")

    def computed(self, sequences) -> None:
        self.seen.append("computed")

    def processed(self, seq) -> None:
        self.seen.append("processed")

    def propose(self, running) -> None:
        self.seen.append("propose")

    def end_step(self, stats) -> None:
        self.seen.append("end_step")

    def released(self, seq_id) -> None:
        self.seen.append("released")


def test_a_step_calls_them_in_order(make_llm) -> None:
    llm = make_llm("llama")
    counting = llm.engine.extensions.add(Counting())
    (prompt,) = tiny.prompts((20,))
    (out,) = llm.generate([prompt], GREEDY)
    step = ["begin_step", "attended", "computed", "processed", "propose", "end_step"]
    last = ["released" if name == "processed" else name for name in step]
    assert counting.seen == step * (GREEDY.max_tokens - 1) + last
    assert counting.tokens == len(prompt) + len(out.outputs[0].token_ids) - 1


@pytest.mark.parametrize("point", ["attended", "processed"])
def test_a_failing_one_ends_its_request_alone(make_llm, point) -> None:
    llm = make_llm("llama")
    alone, _ = llm.generate(prompts := tiny.prompts((20, 24)), GREEDY)

    class Failing(Extension):
        def attended(self, step) -> None:
            if point == "attended" and any(item.seq.num_prompt == 24 for item in step):
                raise RuntimeError("broken")

        def processed(self, seq) -> None:
            if point == "processed" and seq.num_prompt == 24:
                raise RuntimeError("broken")

    llm.engine.extensions.add(Failing())
    sound, broken = llm.generate(prompts, GREEDY)
    assert broken.outputs[0].finish_reason == "error"
    assert sound.outputs[0].token_ids == alone.outputs[0].token_ids
    assert not llm.engine.requests


def test_they_come_in_the_order_of_their_ranks() -> None:
    def ranked(number: int) -> Extension:
        return type("Ranked", (Extension,), {"rank": number})()

    found = Extensions()
    first, second, third = ranked(1), ranked(2), ranked(3)
    for each in (third, first, second):
        assert found.add(each) is each
    assert list(found.ordered) == [first, second, third]


def test_a_plain_request_runs_no_file_of_a_feature(make_llm) -> None:
    """Prefill in chunks, then decode."""
    llm = make_llm("llama", max_num_batched_tokens=16)
    llm.generate(tiny.prompts((12,)), GREEDY)
    with traced() as tracer, tracer.recording() as files:
        llm.generate(tiny.prompts((21,), seed=3), GREEDY)
    assert llm.engine.extensions.ordered == ()
    assert "engine/step/engine.py" in files
    assert off(files) == []
    assert len(files) <= MOST_FILES, sorted(files)


def test_no_part_is_changed_from_outside() -> None:
    """self.part.name = ... belongs into a method of the part."""
    found = []
    for room in ("engine", "schedule", "memory"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    part = node.value
                    own = isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"
                    if own and part.attr not in PLAIN and not _is_counted(path, node):
                        found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def _is_counted(path: Path, node: ast.Attribute) -> bool:
    """Whether the line adds to a counter."""
    line = path.read_text().splitlines()[node.lineno - 1]
    return "+=" in line or "-=" in line
