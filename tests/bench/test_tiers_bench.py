"""`bench tiers`: hits of two tiers against one cache, and its other parts on a tiny model."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

from kvreclaim.bench.prefix import replay_by_request
from kvreclaim.bench.prefix_trace import TracedRequest
from kvreclaim.bench.tiers import engines, first_token, hits, swap
from kvreclaim.bench.tiers.plan import TiersPlan
from kvreclaim.cli.main import app
from kvreclaim.errors import InvalidArgumentError


def conversations(seed: int) -> list[TracedRequest]:
    """Walks down a few trees: prefixes that come back, sooner or later."""
    rng = random.Random(seed)
    found = []
    for number in range(400):
        path, node = [], rng.randrange(12)
        for _ in range(rng.randrange(1, 9)):
            path.append(node)
            node = 12 + 4 * node + rng.randrange(3)
        found.append(TracedRequest(number, (*path, -number - 2)))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("host", [30, 60, 200])
def test_device_and_host_hit_what_one_cache_of_the_hosts_size_hits(seed, host):
    """And the device hits what it hits alone."""
    requests = conversations(seed)
    both = hits.replay(requests, 20, host)
    assert both["hits"] == replay_by_request(requests, "lru", host)["hits"]
    assert both["device_hits"] == replay_by_request(requests, "lru", 20)["hits"]
    assert 0 < both["device_hits"] < both["hits"] == both["device_hits"] + both["host_hits"]


def test_a_trace_from_the_command_line(tmp_path):
    trace, file = tmp_path / "trace.jsonl", tmp_path / "result.json"
    lines = ({"timestamp": 0, "hash_ids": list(each.block_ids)} for each in conversations(1))
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ["bench", "tiers", "--no-first-token", "--no-swap", "--trace", str(trace)]
    result = CliRunner().invoke(app, [*options, "--tiers", "20,60", "--json", str(file)])
    assert result.exit_code == 0, result.output
    alone, both = json.loads(file.read_text())["rows"]
    assert (alone["part"], alone["device"], alone["host"]) == ("hits", 20, 0)
    assert alone["hits"] == alone["device_hits"] == both["device_hits"]
    refused = CliRunner().invoke(app, [*options, "--tiers", "4,60"])
    assert refused.exit_code == 2
    assert "--tiers gives the device 4 blocks" in refused.stderr


def test_first_token_and_swap(tmp_path, tiny_dir):
    """That all answers are equal, and that each prompt is found where its row says, the run asserts."""
    file = tmp_path / "result.json"
    options = ("--model", tiny_dir("llama"), "--threads", 1, "--dtype", "float32", "--prompt", 160)
    options += ("--rounds", 2, "--budget", 48, "--interval", 16, "--json", file)
    result = CliRunner().invoke(app, ["bench", "tiers", *map(str, options)])
    assert result.exit_code == 0, result.output
    assert "hit rates are left out" in result.output
    rows = json.loads(file.read_text())["rows"]
    first = [row for row in rows if row["part"] == "first_token"]
    assert [row["case"] for row in first] == list(first_token.CASES)
    assert all(row["tokens"] == 160 and len(row["times_ms"]) == 2 for row in first)
    swapped = [row for row in rows if row["part"] == "swap"]
    assert [(row["policy"], row["mode"]) for row in swapped] == [
        (policy, mode) for policy in ("full", "knorm") for mode in swap.MODES
    ]
    moved = {(row["policy"], row["mode"]): row["bytes_moved"] for row in swapped}
    assert moved["full", "swap"] > moved["knorm", "swap"] > 0
    assert moved["full", "recompute"] == moved["knorm", "recompute"] == 0


def test_what_differs_stops_the_run():
    with pytest.raises(engines.WrongAnswerError, match=r"disk: tokens \[1, 2\], but \[1, 3\]"):
        engines.require_equal([1, 2], [1, 3], "disk")


def test_plan_refuses(tiny_dir):
    with pytest.raises(InvalidArgumentError, match="--tiers is 1000; pass two"):
        TiersPlan(model=tiny_dir("llama"), tiers=(1000,))
    with pytest.raises(InvalidArgumentError, match="--policy is empty"):
        TiersPlan(model=tiny_dir("llama"), policies=())
    with pytest.raises(InvalidArgumentError, match="nonesuch"):
        TiersPlan(model=tiny_dir("llama"), policies=("nonesuch",))
