"""Ids of the hub: one request, no retries, and the cache where the hub does not answer; where fetched models
lie."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvreclaim import real_model
from kvreclaim.errors import FetchError, InvalidArgumentError
from kvreclaim.hub import hub_options, is_cached, is_hub_id, why_not_on_hub
from kvreclaim.model.fetch import HubModel, fetch_model
from kvreclaim.model.loader import read_config
from kvreclaim.model_paths import REAL_MODEL, SOURCE_FILE, lacks, models_home, num_bytes_of, write_source

CONSTANTS = "huggingface_hub.constants."


class Hub(BaseHTTPRequestHandler):
    """Has the model some/model, and an error for some/broken."""

    paths: list[str]

    def do_HEAD(self) -> None:
        self.paths.append(self.path)
        status = {"/api/models/some/model": 200, "/api/models/some/broken": 500}.get(self.path, 401)
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch) -> Iterator[type[Hub]]:
    Hub.paths = []
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(CONSTANTS + "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(CONSTANTS + "HF_HUB_OFFLINE", False)
        yield Hub
        server.shutdown()
        thread.join()


@pytest.fixture
def unreachable(monkeypatch) -> None:
    monkeypatch.setattr(CONSTANTS + "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(CONSTANTS + "HF_HUB_OFFLINE", False)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.setattr(CONSTANTS + "HF_HUB_CACHE", os.fspath(tmp_path))
    snapshot = tmp_path / "models--own--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return "own/tiny"


def test_the_hub_gets_one_request(hub: type[Hub]) -> None:
    assert why_not_on_hub("some/model") is None
    assert why_not_on_hub("some/broken") is None  # the download reports it
    assert why_not_on_hub("some/other") == "the hub has no such model for you (status 401)"
    assert hub.paths == [f"/api/models/some/{name}" for name in ("model", "broken", "other")]


@pytest.mark.usefixtures("unreachable")
def test_without_a_network_nothing_is_tried_again(tmp_path: Path) -> None:
    reason = why_not_on_hub("some/model")
    assert reason is not None
    assert reason.startswith("the hub is out of reach (")
    with pytest.raises(InvalidArgumentError, match="no directory here, and the hub is out of reach"):
        read_config("some/model")
    with pytest.raises(FetchError, match="cannot be had from the hub"):
        fetch_model(HubModel("some/model"), tmp_path / "made", print)


@pytest.mark.usefixtures("unreachable")
def test_without_a_network_the_cache_is_read(cached: str) -> None:
    assert is_cached(cached)
    assert not is_cached("own/other")
    assert hub_options(cached) == {"local_files_only": True}


def test_offline_is_the_reason(monkeypatch) -> None:
    monkeypatch.setattr(CONSTANTS + "HF_HUB_OFFLINE", True)
    assert why_not_on_hub("some/model") == "HF_HUB_OFFLINE is set"


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("gpt2", True),
        ("some/model-1.5B", True),
        ("a/b/c", False),
        ("/a/b", False),
        ("./a", False),
        ("", False),
    ],
)
def test_what_may_be_an_id(name: str, is_id: bool) -> None:
    assert is_hub_id(name) == is_id
    if not is_id:
        assert hub_options(name) == {}


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
    written = json.loads((model / SOURCE_FILE).read_text())
    (model / SOURCE_FILE).write_text(json.dumps({**written, "layout": 0}))
    assert lacks(model) == "was written by another version of kvreclaim"
