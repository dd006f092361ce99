"""An error names what it is about in a field of its own, apart from its words."""

from __future__ import annotations

import pickle

import pytest

from kvreclaim.checks import check_choice, check_int, check_number, check_offsets, check_text
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("make", "options", "field"),
    [
        (SamplingParams, {"top_p": 0}, "top_p"),
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
