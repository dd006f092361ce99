"""Files that commands write."""

from __future__ import annotations

import json

from kvreclaim.outputs import write_json


def test_an_object_is_written_a_line_a_row(tmp_path):
    content = {"a": 1, "rows": [{"x": 1}, {"y": [1, 2]}], "none": [], "numbers": [1, 2], "text": "é\n"}
    write_json(tmp_path / "new" / "a.json", content)
    text = (tmp_path / "new" / "a.json").read_text()
    assert json.loads(text) == content
    assert text.splitlines()[2:6] == [' "rows": [', '  {"x": 1},', '  {"y": [1, 2]}', " ],"]
    assert len(text.splitlines()) == 10
