"""Where fetched models lie, and when one counts as there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvreclaim import real_model
from kvreclaim.model_paths import REAL_MODEL, SOURCE_FILE, lacks, models_home, num_bytes_of, write_source


@pytest.mark.parametrize(
    ("variables", "home"),
    [
        ({"KVRECLAIM_HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/a/models"),
        ({"KVRECLAIM_HOME": "", "XDG_CACHE_HOME": "/b"}, "/b/kvreclaim/models"),
        ({"XDG_CACHE_HOME": ""}, "/u/.cache/kvreclaim/models"),
        ({}, "/u/.cache/kvreclaim/models"),
    ],
)
def test_the_home_of_models(variables: dict[str, str], home: str, monkeypatch) -> None:
    for name in ("KVRECLAIM_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/u", **variables}.items():
        monkeypatch.setenv(name, value)
    assert models_home() == Path(home)


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> Path:
    """What looks like the fetched model, in a home of the test's own."""
    monkeypatch.setenv("KVRECLAIM_HOME", os.fspath(tmp_path))
    directory = tmp_path / "models" / REAL_MODEL
    (directory / "below").mkdir(parents=True)
    for name in ("config.json", "below/weights"):
        (directory / name).write_text("abc")
    write_source(directory, "somewhere")
    return directory


def test_tests_see_no_model() -> None:
    assert real_model() is None


def test_a_whole_model_is_there_whatever_lies_beside_it(model: Path) -> None:
    (model / "kvreclaim_stats.safetensors").write_text("added later")
    assert real_model() == model
    assert num_bytes_of(model) == sum(p.stat().st_size for p in model.rglob("*") if p.is_file())


@pytest.mark.parametrize("name", ["config.json", "below/weights"])
def test_a_model_that_lacks_a_file_is_not(name: str, model: Path) -> None:
    (model / name).write_text("ab")
    assert lacks(model) == f"lacks {name}, or a part of it"
    (model / name).unlink()
    assert lacks(model) == f"lacks {name}, or a part of it"
    assert real_model() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layout": 1, "files": []}', "\x00"])
def test_a_directory_of_someone_else_is_not(text: str, model: Path) -> None:
    (model / SOURCE_FILE).write_text(text)
    assert lacks(model) == "was not written by `kvreclaim fetch`"
    (model / SOURCE_FILE).unlink()
    assert real_model() is None


def test_another_layout_is_not(model: Path) -> None:
    said = json.loads((model / SOURCE_FILE).read_text())
    (model / SOURCE_FILE).write_text(json.dumps({**said, "layout": 0}))
    assert lacks(model) == "was written by another version of kvreclaim"
