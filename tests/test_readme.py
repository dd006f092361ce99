"""Python examples of the README and docs/features.md run as they stand; those of clients in
tests/server/test_readme_client.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
