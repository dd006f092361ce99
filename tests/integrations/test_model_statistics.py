"""vLLM's model is calibrated before vLLM loads it, once, where no statistics are named."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from kvreclaim import LLM
from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.settings import model_statistics
from kvreclaim.integrations.vllm.settings.model_statistics import ModelToLoad, find_statistics
from kvreclaim.integrations.vllm.settings.options import Options

ARGUMENTS = {"dtype": "float32", "device": "cpu", "hf_overrides": "{}"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "stats"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of processes that load the model."""
    calls: list[Any] = []
    run = subprocess.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return run(*args, **kwargs)

    monkeypatch.setattr(model_statistics.subprocess, "run", counted)
    return calls


def answering(monkeypatch: pytest.MonkeyPatch, stdout: str, returncode: int = 0) -> None:
    done = SimpleNamespace(returncode=returncode, stdout=stdout)
    monkeypatch.setattr(model_statistics.subprocess, "run", lambda *_, **__: done)


def test_two_starts_at_once_calibrate_once_and_later_ones_read_the_note(home, calls, tiny_dir) -> None:
    model = ModelToLoad(tiny_dir("llama"), ARGUMENTS)
    assert find_statistics(model, calibrate=False) is None
    assert not calls
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: find_statistics(model, calibrate=True), range(2))
    assert len(calls) == 1
    assert first == second == find_statistics(model, calibrate=False)
    assert len(calls) == 1
    assert first is not None
    ours = LLM(model.path, dtype="float32", device="cpu", num_blocks=8)
    assert str(ours.stats_file) == first
    assert QueryStats.load(first).metadata.trial is not None

    (note,) = (each for each in (home / "vllm").iterdir() if each.suffix != ".lock")
    note.unlink()  # as after `kvreclaim calibrate`, which writes none
    assert find_statistics(model, calibrate=False) == first
    assert len(calls) == 2
    assert Options.read({"budget": 512}, "here", lambda make: find_statistics(model, make)).stats == first


def test_files_that_changed_are_looked_into_again(home, tmp_path) -> None:
    path = tiny.save_model("llama", tmp_path / "model")
    model = ModelToLoad(path, ARGUMENTS)
    before = model.state
    assert ModelToLoad(path, ARGUMENTS).state == before
    assert ModelToLoad(path, {**ARGUMENTS, "dtype": "bfloat16"}).state != before
    tiny.save_model("llama", path, seed=6)
    assert model.state != before


def test_a_file_beside_the_weights_comes_first(home, calls, tmp_path) -> None:
    beside = tmp_path / "kvreclaim_stats.safetensors"
    beside.touch()
    assert find_statistics(ModelToLoad(tmp_path, ARGUMENTS), calibrate=True) == str(beside)
    assert not calls


def test_under_hf_overrides_our_loader_decides_on_the_file_beside_the_weights(
    home, monkeypatch, tmp_path
) -> None:
    (tmp_path / "kvreclaim_stats.safetensors").touch()
    answering(monkeypatch, '{"file": "of the cache directory"}')
    model = ModelToLoad(tmp_path, {**ARGUMENTS, "hf_overrides": '{"rms_norm_eps": 0.3}'})
    assert find_statistics(model, calibrate=False) == "of the cache directory"


def test_why_there_are_none(home, monkeypatch, tmp_path) -> None:
    model = ModelToLoad(tmp_path, ARGUMENTS)
    answering(monkeypatch, 'noise\n{"error": "it has no tokenizer"}\n')
    with pytest.raises(
        InvalidArgumentError, match=r'calibrated \(it has no tokenizer\); name a file .* "stats"'
    ):
        find_statistics(model, calibrate=True)
    answering(monkeypatch, "", returncode=-9)
    with pytest.raises(InvalidArgumentError, match=r"calibrated \(status -9; its words are above\)"):
        find_statistics(model, calibrate=True)
    answering(monkeypatch, '{"file": null}')
    with pytest.raises(InvalidArgumentError, match="the workers of other machines cannot read"):
        find_statistics(ModelToLoad(tmp_path, ARGUMENTS, nodes=True), calibrate=True)
    monkeypatch.setenv("KVRECLAIM_HOME", "/proc")
    with pytest.raises(InvalidArgumentError, match="set KVRECLAIM_HOME to a directory that can be written"):
        find_statistics(model, calibrate=True)


@pytest.mark.parametrize("overrides", [{"rope_theta": 5.0}, lambda config: config])
def test_the_model_is_that_of_vllms_configuration(overrides, tmp_path) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path), dtype="torch.bfloat16", hf_overrides=overrides),
        parallel_config=SimpleNamespace(nnodes=1, distributed_executor_backend="ray"),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(download_dir=None),
    )
    if callable(overrides):
        with pytest.raises(InvalidArgumentError, match="hf_overrides that is a function"):
            ModelToLoad.of_config(config)
        return
    arguments = {"dtype": "bfloat16", "device": "cpu", "hf_overrides": '{"rope_theta": 5.0}'}
    assert ModelToLoad.of_config(config) == ModelToLoad(tmp_path, arguments, nodes=True)


def test_only_a_policy_that_reads_statistics_looks_for_them() -> None:
    looked: list[bool] = []

    def look(make: bool) -> None:
        looked.append(make)

    Options.read({"policy": "knorm"}, "here", look)
    assert looked == []
    for policy, make in (("query_mixture", True), ("auto", False)):
        with pytest.raises(InvalidArgumentError, match="statistics"):
            Options.read({"policy": policy, "calibrate": make}, "here", look)
    assert looked == [True, False]
