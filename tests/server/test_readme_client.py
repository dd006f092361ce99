"""The client of docs/features.md runs against a server as it stands, but for the port."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "features.md"


def test_the_client_frees_blocks(server, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [example] = [block for block in blocks if "base_url" in block]
    names: dict[str, object] = {}
    exec(compile(example.replace("http://127.0.0.1:8000", server.base_url), "features", "exec"), names)
    names["client"].close()
    *_, cached, freed = capsys.readouterr().out.split()
    assert int(cached) >= 0
    assert int(freed) > 0
