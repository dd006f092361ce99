"""The table of errors has every format, and none is beyond its bound."""

from __future__ import annotations

import pytest

from kvreclaim.kv_bytes import VECTOR_BYTES
from kvreclaim.ops.formats.__main__ import main


def test_the_table_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    main(tokens=320)
    lines = capsys.readouterr().out.splitlines()[1:]
    for name, fmt in VECTOR_BYTES.items():
        assert fmt.is_plain or sum(name in line for line in lines) == 9
    bounds = [line.split()[-1] for line in lines]
    assert len(bounds) == 36
    assert all(bound == "-" or 0.5 < float(bound) < 1.0002 for bound in bounds)
