"""The limit of positions: model cards' configs, as engine, planner and `ls` read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import torch

from kvreclaim import LLM, SamplingParams
from kvreclaim.cli.local_models import local_models
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.model.gguf_index import rope_scaling
from kvreclaim.model.loader import load_model
from kvreclaim.model.overrides import yarn
from kvreclaim.model.position_limit import position_limit
from kvreclaim.plan.configs import load_shape

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
THETA = {"rope_theta": 500.0}
CARDS: dict[str, tuple[dict[str, Any], int, int]] = {
    "Qwen3-8B with YaRN as its card writes it": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        40960,
        131072,
    ),
    "Qwen2.5, in older words": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        32768,
        131072,
    ),
    "DeepSeek-V3, whose config counts the factor": (
        {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        163840,
        163840,
    ),
    "YaRN that names no original length": ({"rope_type": "yarn", "factor": 2.0}, 8192, 16384),
    "YaRN that names no factor": (
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
        8192,
        8192,
    ),
    "a quotient that is rounded": (
        {"rope_type": "yarn", "factor": 100_001 / 49_157, "original_max_position_embeddings": 49_157},
        49_157,
        100_001,
    ),
    "Vicuna-16k": ({"type": "linear", "factor": 4.0}, 4096, 16384),
    "Llama 3.1": (
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        131072,
        131072,
    ),
    "Phi-3-mini-128k": ({"type": "longrope", "original_max_position_embeddings": 4096}, 131072, 4096),
    "dynamic NTK": ({"type": "dynamic", "factor": 2.0}, 4096, 4096),
    "none": ({"rope_type": "default", "rope_theta": 1e6}, 4096, 4096),
}


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("card", CARDS)
def test_the_limits_of_model_cards(card: str, spelling: str) -> None:
    rope, known, limit = CARDS[card]
    assert position_limit({"model_type": "qwen3", spelling: rope}, known) == limit


def test_rotations_of_types_of_layers() -> None:
    nested = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
    assert position_limit({"model_type": "laguna", "rope_parameters": nested}, 128) == 512
    linear = {"full_attention": {"rope_type": "linear", "factor": 8.0}}
    assert position_limit({"model_type": "gemma3_text", "rope_parameters": linear}, 131072) == 131072
    for scaling in ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"rope_scaling": {"type": "su"}}):
        phi3 = {"model_type": "phi3", "original_max_position_embeddings": 4096, **scaling}
        assert position_limit(phi3, 131072) == 4096


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"type": "yarn", "factor": "x"}, "factor is 'x'"),
        ({"type": "yarn", "factor": float("nan")}, "factor is nan"),
        ({"type": "yarn", "factor": float("inf")}, "factor is inf"),
        ({"type": "linear", "factor": 0}, "factor is 0"),
        ({"type": "linear", "factor": 1e300}, "factor is 1e\\+300"),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": -1}, "is -1"),
        ({"type": ["yarn"]}, "rope_type is"),
        ("yarn", "must be an object"),
    ],
    ids=str,
)
def test_rotations_that_are_none(rope: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        position_limit({"model_type": "llama", "rope_scaling": rope}, 4096)


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> Path:
    """A model of 128 positions in the cache directory."""
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path))
    return tiny.save_model("llama", tmp_path / "models" / "tiny", max_position_embeddings=128)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {**YARN, **THETA}},
        {"rope_scaling": YARN, **THETA},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, **THETA},
    ],
    ids=["rope_parameters", "rope_scaling", "type"],
)
def test_a_config_that_leaves_the_original_length(model: Path, rope: dict[str, Any]) -> None:
    """The engine, the planner and `ls` read both spellings alike."""
    config = json.loads((model / "config.json").read_text())
    del config["rope_parameters"]
    (model / "config.json").write_text(json.dumps({**config, **rope}))
    with LLM(model, num_blocks=64, max_model_len=512) as llm:
        assert llm.engine.config.max_model_len == llm.loaded.facts.max_position == 512
    assert load_shape(model).max_position == 512
    assert [each.context for each in local_models()] == ["512"]
    with pytest.raises(InvalidArgumentError, match="made for 512 positions"):
        LLM(model, num_blocks=64, max_model_len=513)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": YARN},
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        {"rope_parameters": {"type": "yarn", "factor": 4.0}},
    ],
    ids=str,
)
def test_overrides_in_both_spellings(model: Path, changes: dict[str, Any]) -> None:
    own = json.loads((model / "config.json").read_text())["rope_parameters"]["rope_theta"]
    loaded = load_model(model, hf_overrides=changes)
    assert loaded.facts.max_position == 512
    rotation = loaded.model.config.rope_parameters
    assert (rotation["rope_type"], rotation["rope_theta"], "type" in rotation) == ("yarn", own, False)
    plain = load_model(model, hf_overrides={"rope_scaling": None, "rope_theta": 7.0})
    assert plain.model.config.rope_parameters == {"rope_type": "default", "rope_theta": 7.0}


def test_a_gguf_header_in_the_planner_and_ls(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "tiny.gguf"
    tiny_gguf.write(file, scaling="yarn", max_position_embeddings=128, **tiny_gguf.YARN)
    assert load_model(file).facts.max_position == 512
    assert load_shape(file).max_position == 512
    assert [each.context for each in local_models()] == ["512"]


SCALED = {"general.architecture": "llama", "llama.context_length": 128}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, {}),
        ({"type": "none", "factor": 4.0}, {}),
        ({"type": "yarn"}, {}),
        ({"type": "linear", "factor": 1.0}, {}),
        ({"factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"type": "yarn", "factor": 4.0}, YARN),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0},
            {**YARN, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
    ],
    ids=str,
)
def test_what_llama_cpp_reads_of_a_header(fields: dict[str, Any], rope: dict[str, Any]) -> None:
    assert (
        rope_scaling(SCALED | {f"llama.rope.scaling.{key}": value for key, value in fields.items()}) == rope
    )


@pytest.mark.parametrize("more", [{"type": "su"}, {"type": "yarn", "yarn_log_multiplier": 0.1}], ids=str)
def test_scalings_that_transformers_does_not_have(more: dict[str, Any]) -> None:
    fields = {"llama.rope.scaling.factor": 2.0} | {f"llama.rope.scaling.{key}": x for key, x in more.items()}
    with pytest.raises(UnsupportedModelError, match="not read from GGUF"):
        rope_scaling(SCALED | fields)


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_overrides_are_as_if_in_the_file(tmp_path: Path) -> None:
    """YaRN over four times the positions: the same answers as with a config.json that has it."""
    path = tmp_path / "changed"
    tiny.save_model("llama", path)
    shutil.copytree(path, tmp_path / "file")
    config = json.loads((path / "config.json").read_text())
    known = config["max_position_embeddings"]
    length = 3 * known + 1
    changes = yarn(known, length)
    assert changes["max_position_embeddings"] == length
    config["rope_parameters"] |= changes["rope_parameters"]
    config["max_position_embeddings"] = length
    (tmp_path / "file" / "config.json").write_text(json.dumps(config))
    prompt = tiny.prompts((2 * known,), seed=5)
    plain, changed, file = (
        LLM(where, num_blocks=4 * known // 16, **how)
        for where, how in ((path, {}), (path, {"hf_overrides": changes}), (tmp_path / "file", {}))
    )
    assert changed.engine.config.max_model_len == length
    want = file.generate(prompt, GREEDY)[0].outputs[0].token_ids
    assert changed.generate(prompt, GREEDY)[0].outputs[0].token_ids == want
    assert changed.loaded.facts.fingerprint == file.loaded.facts.fingerprint
    assert changed.loaded.facts.fingerprint != plain.loaded.facts.fingerprint
    assert torch.equal(
        changed.loaded.model.model.rotary_emb.inv_freq, file.loaded.model.model.rotary_emb.inv_freq
    )
    assert changed.sibling(num_blocks=8).engine.config.hf_overrides == changed.engine.config.hf_overrides
    with pytest.raises(InvalidArgumentError, match="hf_overrides is None, and the weights were loaded with"):
        changed.sibling(hf_overrides=None)


def test_positions_that_suffice_are_left_alone() -> None:
    assert yarn(512, 512) == {}


def test_one_way_of_writing() -> None:
    assert EngineConfig(hf_overrides={"b": 1, "a": 2}).hf_overrides == '{"a": 2, "b": 1}'
    assert EngineConfig(hf_overrides='{"b":1,"a":2}').hf_overrides == '{"a": 2, "b": 1}'
    assert EngineConfig(hf_overrides={}).hf_overrides is None


@pytest.mark.parametrize("given", ["{", "[1]", 3, {"a": {1, 2}}])
def test_what_is_no_object(given: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"pass fields of config.json as a dict"):
        EngineConfig(hf_overrides=given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scalling": {}}, "names 'rope_scalling', which the config of"),
        ({"num_hidden_layers": 3}, "lack 9 tensors"),
        ({"hidden_size": "wide"}, "does not take hf_overrides"),
    ],
)
def test_what_the_config_or_the_weights_do_not_take(tmp_path: Path, changes: dict, words: str) -> None:
    tiny.save_model("llama", tmp_path)
    with pytest.raises(InvalidArgumentError, match=words):
        load_model(tmp_path, hf_overrides=changes)
