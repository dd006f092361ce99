"""Memory of windows as the formulas say, and hits of conversations in pools that are almost full."""

from __future__ import annotations

import pytest
from window_groups import CONTEXTS, SHAPES, GroupsPlan, held_bytes, hit_rows

from kvreclaim.memory.windows import ChunkedWindow, Place, Window, grouping


@pytest.mark.parametrize(
    ("model", "ratios"),
    [
        ("gpt-oss-20b", (1.97, 1.99, 2.0)),
        ("gemma-2-9b", (1.33, 1.78, 1.94)),
        ("gemma-3-4b", (3.89, 5.73, 6.5)),
        ("gemma-3-27b", (3.54, 5.22, 5.92)),
        ("llama-4-scout", (1.0, 2.29, 3.37)),
    ],
)
def test_memory_of_one_sequence(model, ratios):
    """Layers of the same kind by the formula: blocks of all tokens, and of the window or the chunk."""
    shape = SHAPES[model]
    for context, ratio in zip(CONTEXTS, ratios, strict=True):
        together, grouped = (held_bytes(shape, context, grouped=grouped) for grouped in (False, True))
        found = grouping(shape.windows)
        tables = sum(window.num_blocks for window in found.windows)
        entries = shape.window.num_tokens // 16  # the last token ends a block
        blocks = context // 16 + tables * min(entries, context // 16)
        assert grouped == blocks * len(found.full) * 16 * shape.token_bytes
        assert together / grouped == pytest.approx(ratio, abs=0.005)


def test_layers_are_put_into_groups_of_as_many_as_have_full_attention():
    four, eight = Window(4), ChunkedWindow(8)
    found = grouping([four, four, None, eight, four, None, four, four])
    assert found.full == (2, 5)
    assert found.windows == (Window(4, 3), ChunkedWindow(8, 1))
    assert found.places == tuple(
        Place(*each) for each in ((1, 0), (1, 1), (0, 0), (4, 0), (2, 0), (0, 1), (2, 1), (3, 0))
    )
    assert grouping([None, None]) is None
    assert grouping([four, four]) is None


def test_conversations_hit_what_they_would_in_a_pool_without_end():
    """Where windows that have been left go behind everything else that is cached, as elsewhere, hits fall."""
    rows = hit_rows(GroupsPlan(conversations=12, turns=3, question=100, answer=4000), occupancies=(0.9,))
    assert {row["model"] for row in rows} == {"gpt-oss-20b", "gemma-3-4b"}
    assert all(row["most"] > 50_000 for row in rows)
    assert all(row["share"] >= 0.95 for row in rows)
    full = next(row for row in rows if row["model"] == "gemma-3-4b")
    assert full["share_last_out"] < 0.5
