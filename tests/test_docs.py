"""Python examples, links, and tables of options in the README and docs are right as they stand; examples of
clients are in tests/server/test_clients.py."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from kvreclaim import BeamSearchParams
from kvreclaim.config import OFFLOAD, EngineConfig
from kvreclaim.options import settings_of

ROOT = Path(__file__).parents[1]
TEXT = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/features.md"))
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
EXAMPLES = [block for block in BLOCKS if "base_url" not in block]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number, capsys):
    exec(compile(EXAMPLES[number], f"README example {number}", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


PAGES = sorted(page for folder in ("*.md", "docs/*.md", "examples/*/*.md") for page in ROOT.glob(folder))
LINK = re.compile(r"\]\(([^()\s]+)\)")


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def is_broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or (bool(anchor) and anchor not in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(without_code(page.read_text(encoding="utf-8")))
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if is_broken(page, link)] == []


def test_a_broken_link_is_found() -> None:
    page = ROOT / "docs" / "features.md"
    assert is_broken(page, "policies.md#no-such-heading")
    assert is_broken(page, "no-such-page.md")
    assert not is_broken(page, "policies.md#the-default-auto")


DOCS = (Path(__file__).parents[1] / "docs" / "beams.md").read_text(encoding="utf-8")


def test_every_parameter_is_in_the_table() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| (\S+) \|", DOCS, re.MULTILINE)
    params = BeamSearchParams()
    assert dict(rows) == {each.name: str(getattr(params, each.name)) for each in fields(params)}


def test_the_example_runs(capsys) -> None:
    example = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)[0]
    exec(example, {})
    assert len(capsys.readouterr().out.splitlines()) == 2


TIER_PAGES = Path(__file__).parents[1] / "docs"
TIERS, SNAPSHOTS = (
    (TIER_PAGES / f"{name}.md").read_text(encoding="utf-8") for name in ("tiers", "snapshots")
)
OPTIONS = {
    name: each
    for name, each in settings_of(EngineConfig).items()
    if each.spec.panel == OFFLOAD or name == "kv_offloading_size"
}


def rows() -> dict[str, str]:
    """The table's defaults by option."""
    section = TIERS.split("## Options")[1].split("\n## ")[0]
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


def test_the_example_of_tiers_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TIERS, re.DOTALL)
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
