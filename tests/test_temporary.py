"""Temporary directories are unique, go in the end, and go at the next one if their process was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvreclaim.temporary import PREFIX, left_over, lock, remove_left_over, temporary_directory

HOLD = """
import sys, time
from pathlib import Path
from kvreclaim.temporary import temporary_directory
with temporary_directory(Path(sys.argv[1]), "test") as made:
    (made / "file").write_bytes(bytes(100))
    print(made, flush=True)
    time.sleep(600)
"""


def test_what_is_in_use_stays_and_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        made = Path(other.stdout.readline().strip())
        with temporary_directory(tmp_path, "test") as own:
            assert own != made
            assert left_over(tmp_path) == []
            remove_left_over(tmp_path)
            assert (made / "file").exists()
        assert not own.exists()
        other.send_signal(signal.SIGKILL)
    assert left_over(tmp_path) == [made]
    with temporary_directory(tmp_path, "test") as own:
        assert list(tmp_path.iterdir()) == [own]
    assert list(tmp_path.iterdir()) == []


def test_files_and_links(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    link, file = tmp_path / f"{PREFIX}link", tmp_path / f"{PREFIX}file"
    link.symlink_to(elsewhere)
    with file.open("wb") as opened:
        lock(opened.fileno())
        remove_left_over(tmp_path)
        assert file.exists()
    remove_left_over(tmp_path)
    assert sorted(tmp_path.iterdir()) == [link, elsewhere]
    assert (elsewhere / "file").exists()


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), temporary_directory(tmp_path, "test"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
