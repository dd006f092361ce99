"""An error names what it is about in a field of its own, apart from its words."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvreclaim
from kvreclaim.checks import check_choice, check_int, check_number, check_offsets, check_text
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.outputs import write_json
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.temporary import PREFIX, left_over, lock, remove_left_over, temporary_directory


@pytest.mark.parametrize(
    ("make", "options", "field"),
    [
        (SamplingParams, {"top_p": -1}, "top_p"),
        (SamplingParams, {"n": 2, "temperature": 0}, "n"),
        (SamplingParams, {"stop": [1]}, "stop"),
        (SamplingParams, {"stop_token_ids": [-1]}, "stop_token_ids"),
        (SamplingParams, {"logit_bias": {-1: 0}}, "logit_bias"),
        (SamplingParams, {"logit_bias": {1: 101}}, "logit_bias"),
        (SamplingParams, {"logit_bias": [1]}, "logit_bias"),
        (SamplingParams, {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        (SamplingParams, {"ignore_eos": 1}, "ignore_eos"),
        (SamplingParams, {"bad_words": "a"}, "bad_words"),
        (EngineConfig, {"kernels": "zoo"}, "kernels"),
        (EngineConfig, {"eviction_policy": None}, "eviction_policy"),
        (CompressionConfig, {"budget": 0}, "budget"),
    ],
    ids=str,
)
def test_a_setting_is_named(make, options, field):
    with pytest.raises(InvalidArgumentError) as refused:
        make(**options)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("check", "field"),
    [
        (lambda: check_int("size", 0, 1), "size"),
        (lambda: check_int("the size", 0, 1), None),
        (lambda: check_number("the size", 3, 1, 2, field="size"), "size"),
        (lambda: check_choice("size", "big", ["small"]), "size"),
        (lambda: check_offsets("sizes", [1, -1]), "sizes"),
        (lambda: check_text("the name", "\ud800", "name"), "name"),
    ],
)
def test_a_check_knows_its_field_where_the_name_is_one_word(check, field):
    with pytest.raises(InvalidArgumentError) as refused:
        check()
    assert refused.value.field == field


def test_the_field_goes_along_to_another_process():
    error = pickle.loads(pickle.dumps(InvalidArgumentError("size is 0.", field="size")))
    assert (str(error), error.field) == ("size is 0.", "size")
    assert str(UnknownRequestError("gone")) == "gone"


def test_every_public_name_is_there():
    assert all(getattr(kvreclaim, name) is not None for name in kvreclaim.__all__)


def test_an_object_is_written_a_line_a_row(tmp_path):
    content = {"a": 1, "rows": [{"x": 1}, {"y": [1, 2]}], "none": [], "numbers": [1, 2], "text": "é\n"}
    write_json(tmp_path / "new" / "a.json", content)
    text = (tmp_path / "new" / "a.json").read_text()
    assert json.loads(text) == content
    assert text.splitlines()[2:6] == [' "rows": [', '  {"x": 1},', '  {"y": [1, 2]}', " ],"]
    assert len(text.splitlines()) == 10


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
