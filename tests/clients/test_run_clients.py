"""The runner of `make clients`, on files of its own instead of clients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import run

ROW = 'print(\'["a", "b", "ok"]\', flush=True)'


def came(directory: Path, program: str, limit_s: float = 60.0) -> list[str]:
    (directory / "file.py").write_text(f"import sys, time\n{program}\n")
    found = run.rows_of([sys.executable, str(directory / "file.py")], limit_s)
    return [answer for _, _, answer in found]


def test_a_long_log_does_not_hold_a_client_up(tmp_path: Path) -> None:
    assert came(tmp_path, f"sys.stderr.write('x' * 10**6)\n{ROW}") == ["ok"]


def test_a_file_that_fails_is_a_row_with_the_end_of_its_log(tmp_path: Path) -> None:
    first, last = came(tmp_path, f"{ROW}\nsys.exit('the reason')")
    assert first == "ok"
    assert last.startswith("exit status 1 after 1 rows")
    assert last.endswith("the reason")


def test_a_file_without_rows_is_not_ok(tmp_path: Path) -> None:
    (only,) = came(tmp_path, "print('nothing')")
    assert only.startswith("exit status 0 after 0 rows")


def test_a_client_that_hangs_is_stopped(tmp_path: Path) -> None:
    assert came(tmp_path, "time.sleep(3600)", limit_s=0.5)[-1].startswith("exit status -9")


def test_node_rows_are_skipped_without_node(tmp_path: Path) -> None:
    ((_, _, answer),) = run.answers([run.NODE], tmp_path, "http://any", "any")
    assert answer.startswith(run.SKIPPED)


def test_a_name_of_no_file_is_an_error(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "typo"])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert "--only 'typo' is part of no file's name" in capsys.readouterr().err
