"""docs/serving.md has every limit, with the default that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvreclaim.options import settings_of
from kvreclaim.server.base.config import ServerConfig

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
LIMIT = re.compile(r"(max|min|allowed)_.*|.*_timeout_s|client_kv_compression")
ELSEWHERE = {"shutdown_timeout_s"}
"""It limits nobody: the section on stopping has it."""


def rows() -> dict[str, list[str]]:
    """The table's rows by option: default, why, what is over it."""
    section = DOCS.read_text().split("## Limits")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `--")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def limits() -> dict[str, object]:
    """Options of the server that limit clients, by flag: their defaults."""
    found = {}
    for name, setting in settings_of(ServerConfig).items():
        if LIMIT.fullmatch(name) and name not in ELSEWHERE:
            flag = setting.spec.flags[0] if setting.spec.flags else f"--{name.replace('_', '-')}"
            found[f"--no-{flag[2:]}" if setting.default is True else flag] = setting.default
    return found


def test_every_limit_is_in_the_table():
    assert rows().keys() == limits().keys() | {"--max-model-len"}


@pytest.mark.parametrize("flag", limits())
def test_with_its_default_a_reason_and_an_answer(flag: str):
    said, why, over = rows()[flag]
    default = limits()[flag]
    if default is True:
        assert said == "off"
    elif isinstance(default, (int, float)):
        assert float(said.removesuffix(" s").replace(",", "")) == default
    else:
        assert said[0].isalpha() or said.startswith("256 KiB + 32 bytes"), "it depends on something"
    assert why
    assert re.search(r"\b(4\d\d|503)\b|the same|the end of", over)
