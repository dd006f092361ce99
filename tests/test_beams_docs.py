"""docs/beams.md has every parameter with the default that it has, and its example runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from kvreclaim import BeamSearchParams

DOCS = (Path(__file__).parents[1] / "docs" / "beams.md").read_text(encoding="utf-8")


def test_every_parameter_is_in_the_table() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| (\S+) \|", DOCS, re.MULTILINE)
    params = BeamSearchParams()
    assert dict(rows) == {each.name: str(getattr(params, each.name)) for each in fields(params)}


def test_the_example_runs(capsys) -> None:
    example = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)[0]
    exec(example, {})
    assert len(capsys.readouterr().out.splitlines()) == 2
