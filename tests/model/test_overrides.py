"""Fields of a config that a caller replaces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch

from kvreclaim import LLM, SamplingParams
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.loader import load_model
from kvreclaim.model.overrides import yarn

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_as_if_the_file_said_so(tmp_path: Path) -> None:
    """YaRN over four times the positions: the same answers as with a config.json that asks for it."""
    path = tmp_path / "said"
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
    plain, said, file = (
        LLM(where, num_blocks=4 * known // 16, **how)
        for where, how in ((path, {}), (path, {"hf_overrides": changes}), (tmp_path / "file", {}))
    )
    assert said.engine.config.max_model_len == length
    want = file.generate(prompt, GREEDY)[0].outputs[0].token_ids
    assert said.generate(prompt, GREEDY)[0].outputs[0].token_ids == want
    assert said.loaded.facts.fingerprint == file.loaded.facts.fingerprint
    assert said.loaded.facts.fingerprint != plain.loaded.facts.fingerprint
    assert torch.equal(
        said.loaded.model.model.rotary_emb.inv_freq, file.loaded.model.model.rotary_emb.inv_freq
    )
    assert said.sibling(num_blocks=8).engine.config.hf_overrides == said.engine.config.hf_overrides
    with pytest.raises(InvalidArgumentError, match="hf_overrides is None, and the weights were loaded with"):
        said.sibling(hf_overrides=None)


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
