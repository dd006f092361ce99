"""Every `kvreclaim plan` in docs/planning.md prints what stands there, and every known type is named."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvreclaim.cli.main import app
from kvreclaim.kv_bytes import KV_BYTES
from kvreclaim.plan.configs import load_shape
from kvreclaim.plan.families import COMPOSITE, FAMILIES

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n\$ kvreclaim (plan .*)\n((?:(?!```)(?:.*\n))*)```", DOCS)


@pytest.mark.parametrize(("command", "printed"), BLOCKS, ids=[str(n) for n in range(len(BLOCKS))])
def test_a_command_prints_what_stands_there(command: str, printed: str, monkeypatch) -> None:
    """`python scripts/docs.py planning` writes it anew."""
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    assert result.output == printed


def test_there_are_commands() -> None:
    assert BLOCKS


def test_all_types_are_named() -> None:
    named = re.search(r"these model types are known: (.*?)\. Any other", DOCS)
    assert named is not None
    assert {*named[1].split(", ")} == {*FAMILIES, *COMPOSITE} - {"gemma3_text", "llama4_text", "qwen3_5_text"}


def test_shares_of_hybrids() -> None:
    """The table in docs/groups.md is the planner's."""
    page = (ROOT / "docs" / "groups.md").read_text(encoding="utf-8").partition("| a state in tokens |")[2]
    rows = re.findall(r"^\| (\S+) \| (\d+ / \d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) >= 7
    for name, layers, rest in rows:
        shape = load_shape(name)
        state = shape.state_bytes(16)
        token = KV_BYTES["bf16"].bytes_per_block(shape.attention, 1)
        assert layers == f"{len(shape.attention)} / {sum(x.is_recurrent for x in shape.layers)}"
        shares = [f"{100 * n * token / (n * token + 2 * state):.0f} %" for n in (8192, 32_768, 131_072)]
        sizes = [f"{token / 1024:g} KiB", f"{state / 2**20:.1f} MiB", f"{state / token:,.0f}"]
        assert rest.split(" | ") == [*sizes, *shares]
