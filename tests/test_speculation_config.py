"""What --speculative-config takes, and how it says what it does not take."""

from __future__ import annotations

import json

import pytest

from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.speculation import SpeculativeConfig, from_json


def test_a_dict_json_and_the_object_are_one():
    said = {"method": "ngram", "num_speculative_tokens": 4}
    ways = (said, json.dumps(said), SpeculativeConfig(num_speculative_tokens=4))
    found = {EngineConfig(speculative_config=way).speculative_config for way in ways}
    assert len(found) == 1
    assert from_json(found.pop()) == SpeculativeConfig(num_speculative_tokens=4)


def test_nothing_is_none():
    assert EngineConfig().speculative_config is None
    assert from_json(None) is None


def test_a_short_lookup_alone_shortens_the_least():
    found = from_json(EngineConfig(speculative_config={"prompt_lookup_max": 1}).speculative_config)
    assert found is not None
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == (1, 1)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("{", "pass a dict, or JSON"),
        ([1], "pass a dict, or JSON"),
        ({"method": "eagle"}, "one of ngram, draft_model"),
        ({"draft_tensor_parallel_size": 1}, "its fields are method"),
        ({"num_speculative_tokens": 0}, ">= 1"),
        ({"num_speculative_tokens": 65}, "<= 64"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "above prompt_lookup_max"),
        ({"method": "draft_model"}, "no model"),
        ({"method": "draft_model", "model": 3}, "pass a directory"),
        ({"model": "x"}, "uses none"),
    ],
)
def test_a_mistake_is_one_sentence(said, sentence):
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig(speculative_config=said)
    assert sentence in str(caught.value)
