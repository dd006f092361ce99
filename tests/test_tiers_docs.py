"""docs/tiers.md has every option of the tiers with its default; its examples and docs/snapshots.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvreclaim.config import OFFLOAD, EngineConfig
from kvreclaim.options import settings_of

PAGES = Path(__file__).parents[1] / "docs"
DOCS, SNAPSHOTS = ((PAGES / f"{name}.md").read_text(encoding="utf-8") for name in ("tiers", "snapshots"))
OPTIONS = {
    name: each
    for name, each in settings_of(EngineConfig).items()
    if each.spec.panel == OFFLOAD or name == "kv_offloading_size"
}


def rows() -> dict[str, str]:
    """The table's defaults by option."""
    section = DOCS.split("## Options")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `--")]
    return {re.findall(r"`(--[^`]+)`", cells[0])[0]: cells[1].strip() for cells in lines}


def flag(name: str) -> str:
    spec = OPTIONS[name].spec
    plain = spec.flags[0] if spec.flags else f"--{name.replace('_', '-')}"
    return f"--no-{plain[2:]}" if OPTIONS[name].default is True else plain


def test_every_option_is_in_the_table() -> None:
    assert rows().keys() == set(map(flag, OPTIONS))


@pytest.mark.parametrize("name", OPTIONS)
def test_with_its_default(name: str) -> None:
    default_cell, default = rows()[flag(name)], OPTIONS[name].default
    if name == "swap_space":
        assert default_cell == "half of the size"
    elif default is True:
        assert default_cell == "on"
    elif isinstance(default, float):
        assert float(default_cell) == default
    else:
        assert default_cell == ("none" if default is None else default)


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert "/tmp/kvreclaim-blocks" in example
    exec(compile(example.replace("/tmp/kvreclaim-blocks", str(tmp_path)), "docs/tiers.md", "exec"), {})
    assert "TierStats(host=SlotStats(" in capsys.readouterr().out


def test_the_examples_of_snapshots_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix, turns, disk = re.findall(r"```python\n(.*?)```", SNAPSHOTS, re.DOTALL)
    exec(compile(prefix, "docs/snapshots.md", "exec"), {})
    assert capsys.readouterr().out.split() == ["0", "200"]
    exec(compile(turns, "docs/snapshots.md", "exec"), {})
    assert capsys.readouterr().out.split() == re.search(r"# (200 0, .*)", turns)[1].replace(",", "").split()
    assert "/tmp/kvreclaim-prefixes" in disk
    exec(compile(disk.replace("/tmp/kvreclaim-prefixes", str(tmp_path)), "docs/snapshots.md", "exec"), {})
    assert capsys.readouterr().out.split() == ["0", "200"]
