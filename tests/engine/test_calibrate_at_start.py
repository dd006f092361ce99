"""A model without statistics is calibrated at the start, once, if that is allowed."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import tiny

from kvreclaim import LLM, CompressionConfig
from kvreclaim.calibrate.statistics import calibrate_at_start
from kvreclaim.compression.stats import QueryStats
from kvreclaim.engine.api.kept_statistics import kept_statistics
from kvreclaim.engine.serving.messages import EngineSpec
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError
from kvreclaim.model_paths import STATS_FILE

AUTO = CompressionConfig(budget=48, recent=8)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path))
    return tmp_path


def start(directory: Path, **arguments) -> LLM:
    return LLM(directory, device="cpu", dtype="float32", num_blocks=200, **arguments)


def unwanted(llm: LLM) -> None:
    raise AssertionError("there are statistics")


@pytest.fixture
def kept(home, tiny_dir) -> Path:
    """The file of a first start, whose settings crossed to another process."""
    spec = EngineSpec(
        model=str(tiny_dir("llama")),
        dtype="float32",
        device="cpu",
        compression=AUTO,
        calibrate=calibrate_at_start,
        options={"num_blocks": 200, "block_size": 8},
    )
    llm = pickle.loads(pickle.dumps(spec)).load()
    (file,) = (home / "stats").iterdir()
    assert llm.stats_file == file
    assert llm.compression.policy == QueryStats.load(file).metadata.trial.best
    assert (llm.engine.config.num_blocks, llm.engine.config.block_size) == (200, 8)
    return file


def test_the_next_start_reads_what_the_first_has_kept(kept, tiny_dir, caplog) -> None:
    first = start(tiny_dir("llama"), compression=AUTO, calibrate=unwanted)
    with caplog.at_level("INFO", "kvreclaim"):
        second = start(tiny_dir("llama"), compression=AUTO)
    assert f"query statistics: {kept}" in caplog.messages
    best = QueryStats.load(kept).metadata.trial.best
    assert first.compression.policy == second.compression.policy == best
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(StatsMismatchError, match=r"no valid statistics file .* run `kvreclaim calibrate`"):
        start(tiny_dir("llama"), compression=AUTO, calibrate=unwanted)


def test_other_weights_of_the_same_architecture_have_none(kept, tmp_path) -> None:
    other = tiny.save_model("llama", tmp_path / "other", seed=6)
    assert start(other).loaded.facts.fingerprint == QueryStats.load(kept).metadata.fingerprint
    with pytest.raises(InvalidArgumentError, match=r"no statistics of .* --kv-compression-calibrate"):
        start(other, compression=AUTO)


def test_statistics_beside_the_weights_and_named_ones_come_first(kept, calibrated_dir, tiny_dir) -> None:
    beside = start(calibrated_dir("llama"), calibrate=unwanted)
    assert kept_statistics(beside.loaded) == kept
    assert beside.stats_file != kept
    named = CompressionConfig("triattention", 48, recent=8, stats=beside.stats_file)
    kept.unlink()
    start(tiny_dir("llama"), compression=named, calibrate=unwanted)
    assert not kept.exists()


def test_a_model_that_reads_no_text_says_so(home, tiny_dir) -> None:
    with pytest.raises(InvalidArgumentError, match="has no tokenizer"):
        start(tiny_dir("qwen3"), compression=AUTO, calibrate=calibrate_at_start)
    assert not (home / "stats").exists()


def test_a_cache_directory_that_takes_nothing_is_refused(tiny_dir) -> None:
    with pytest.raises(InvalidArgumentError, match="set KVRECLAIM_HOME to a directory"):
        start(tiny_dir("llama"), compression=AUTO, calibrate=calibrate_at_start)


def test_statistics_of_another_config_are_not_taken(home, calibrated_dir, tmp_path) -> None:
    beside = calibrated_dir("llama") / STATS_FILE
    changed = {"rms_norm_eps": 0.3}
    assert start(beside.parent, hf_overrides={"max_position_embeddings": 400}).stats_file == beside
    other = start(beside.parent, hf_overrides=changed)
    assert other.stats_file == kept_statistics(other.loaded)
    assert other.stats_file != kept_statistics(start(beside.parent).loaded)
    differs = "rms_norm_eps 1e-06, the model has 0.3"
    named = CompressionConfig("triattention", 48, recent=8, stats=beside)
    with pytest.raises(StatsMismatchError, match=differs):
        start(beside.parent, compression=named, hf_overrides=changed)

    edited = shutil.copytree(beside.parent, tmp_path / "edited")
    config = json.loads((edited / "config.json").read_text())
    (edited / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(StatsMismatchError, match=differs):
        start(edited, compression=AUTO)
    (edited / STATS_FILE).unlink()
    assert start(edited).stats_file == other.stats_file

    calibrate_at_start(other, say=str)
    shutil.copyfile(other.stats_file, beside_changed := edited / STATS_FILE)
    assert start(edited, compression=AUTO).stats_file == beside_changed
    (edited / "config.json").write_text(json.dumps(config))
    assert start(edited, hf_overrides=changed).stats_file == beside_changed
