"""The replay of a trace, against hit rates counted by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvreclaim.bench import prefix, prefix_pins
from kvreclaim.bench.prefix_trace import TracedRequest, read_trace
from kvreclaim.cli.main import app
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory import eviction_orders

REQUESTS = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3], [5, 6, 7]]
"""An infinite cache hits 0 + 2 + 0 + 3 + 2 of 14 blocks.

Three blocks, least recently used, by request: after [1 2 3] they stand 3 2 1 (3 goes first); [1 2 4] hits
2 and takes 3's place: 4 2 1; [5 6] takes 4 and 2: 1 6 5; [1 2 3] hits 1 and takes 6, 5: 3 2 1;
[5 6 7] takes all. 2 + 1 hits.

By block: 1 2 3; hits 1 and 2: 3 1 2, 4 takes 3: 1 2 4; 5, 6 take 1, 2: 4 5 6; nothing is left of
[1 2 3] nor of [5 6 7]. 2 hits.
"""


def write(path: Path, requests: list[list[int]]) -> Path:
    rows = ({"timestamp": 1000 * i, "hash_ids": ids} for i, ids in enumerate(requests))
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "small.jsonl", REQUESTS)


def hits(rows: list[dict], **where: object) -> list[int]:
    return [row["hits"] for row in rows if where.items() <= row.items()]


def test_hits_counted_by_hand(trace):
    rows = prefix.run(prefix.PrefixPlan(trace, (3,), ("lru",)))
    assert {row["queries"] for row in rows} == {14}
    assert hits(rows, rule=prefix.BY_REQUEST, num_blocks=3) == [3]
    assert hits(rows, rule=prefix.BY_BLOCK, num_blocks=3) == [2]
    assert hits(rows, num_blocks=None) == [7, 7]
    assert [row["hit_rate"] for row in rows] == [row["hits"] / 14 for row in rows]


@pytest.mark.parametrize(("order", "expected"), [("lru", 1), ("slru", 1), ("lfu", 2), ("gdsf", 2)])
def test_what_came_back_once_outlives_three_that_do_not(order, expected):
    """In three blocks; of which slru protects none: a fifth is less than one."""
    requests = [TracedRequest(0, (block,)) for block in (1, 1, 2, 3, 4, 1)]
    assert prefix.replay_by_request(requests, order, 3)["hits"] == expected


@pytest.mark.parametrize("order", eviction_orders())
def test_every_order_finds_everything_in_an_infinite_cache_and_accounts_for_each_block(trace, order):
    infinite, small = (
        prefix.replay_by_request(read_trace(trace), order, num_blocks) for num_blocks in (14, 3)
    )
    assert (infinite["hits"], infinite["evictions"], infinite["misses"]) == (7, 0, {"cold": 7})
    assert small["hits"] + sum(small["misses"].values()) == 14
    assert small["misses"]["evicted"] > 0


def test_a_partial_match_after_a_gap_is_no_hit():
    """The second block of [1 2] is there, its first is not: by block 2 is computed anew, too."""
    requests = [TracedRequest(0, ids) for ids in ((1, 2), (3,), (1, 2))]
    assert prefix.replay_by_block(requests, "lru", 2)["hits"] == 0
    assert prefix.replay_by_request(requests, "lru", 2)["hits"] == 1


def test_pins_of_one_tenant_leave_the_other_its_half(tmp_path):
    """The other tenant's conversation of four blocks comes back after each of ten different ones of the
    tenant that pins; there is always room for it in the half that can't be pinned, and not without one."""
    other = [0, 3, 5, 7]
    pinning = [[0, 100 + 2 * i, 1000 + i, 2000 + i] for i in range(10)]
    path = write(tmp_path / "two.jsonl", [ids for one in pinning for ids in (other, one)])
    rows = {row["max_pinned_fraction"]: row for row in prefix_pins.run(path, (16,))}
    assert set(rows) == set(prefix_pins.FRACTIONS) == {0.0, 0.25, 0.5, 1.0}
    assert [rows[fraction]["other"] for fraction in (0.0, 0.25, 0.5)] == [0.9] * 3
    assert rows[1.0]["other"] < 0.9
    assert {row["alone_in_half"] for row in rows.values()} == {0.9}
    assert {row["pinning"] for row in rows.values()} == {9 / 40}, "they share their first block"
    assert [rows[fraction]["pinned"] for fraction in (0.0, 0.25, 0.5)] == [0, 4, 8]
    assert all(rows[fraction]["pins_refused"] > 0 for fraction in (0.0, 0.25, 0.5))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,4808,10\n", "no JSON object.*no hit rate"),
        ("", "is empty"),
        ('{"hash_ids": [1]}\n{"hash_ids": \n', "line 2"),
        ('{"input_length": 5}\n', "line 1: hash_ids is None"),
        ('{"hash_ids": [1, "a"]}\n', "line 1: hash_ids is"),
        ('{"hash_ids": [1], "timestamp": "now"}\n', "line 1: timestamp is 'now'"),
        ('{"hash_ids": []}\n', "no block in any request"),
    ],
)
def test_a_file_that_is_no_such_trace_is_refused(tmp_path, content, sentence):
    path = tmp_path / "trace"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=sentence):
        read_trace(path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--blocks", "2"], "--blocks holds 2, but a request of the trace has 3 blocks"),
        (["--blocks", "many"], "--blocks is 'many'"),
        (["--orders", "fifo"], "an entry of --orders is 'fifo'; it must be one of lru, slru,"),
        (["--orders", ""], "--orders is empty"),
    ],
)
def test_the_command_refuses_with_one_sentence(trace, arguments, sentence):
    result = CliRunner().invoke(app, ["bench", "prefix", "--trace", str(trace), *arguments])
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_a_missing_trace_is_named(tmp_path):
    result = CliRunner().invoke(app, ["bench", "prefix", "--trace", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "which is no file" in result.stderr


def test_the_command_prints_a_table_and_writes_the_figures(trace, tmp_path):
    out = tmp_path / "out.json"
    options = ["--trace", str(trace), "--blocks", "3,9", "--orders", "lru,gdsf", "--pins", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "prefix", *options])
    assert result.exit_code == 0, result.output
    assert all(word in result.stdout for word in ("by block", "by request", "infinite", ".5000", ".1429"))
    content = json.loads(out.read_text(encoding="utf-8"))
    assert [(row["order"], row["rule"], row["num_blocks"]) for row in content["rows"]] == [
        (order, rule, size)
        for order, rule in (("lru", "by block"), ("lru", "by request"), ("gdsf", "by request"))
        for size in (3, 9, None)
    ]
    assert len(content["pins"]) == 2 * len(prefix_pins.FRACTIONS)


@pytest.mark.skipif("KVR_MOONCAKE_TRACE" not in os.environ, reason="KVR_MOONCAKE_TRACE names no trace")
def test_the_published_figures_of_the_conversation_trace():
    plan = prefix.PrefixPlan(Path(os.environ["KVR_MOONCAKE_TRACE"]), orders=("lru",))
    rows = [row for row in prefix.run(plan) if row["rule"] == prefix.BY_BLOCK]
    assert [f"{row['hit_rate']:.4f}" for row in rows] == ["0.0445", "0.0858", "0.2627", "0.3593", "0.3664"]
