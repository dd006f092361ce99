"""Policies whose way of compressing does not go with the model or with itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.refusals import check_policy
from kvreclaim.compression.registry import make_policy
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import LayerFacts, ModelFacts, Softmax
from kvreclaim.ops.rope import RopeLayout
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

LAYER = LayerFacts(4, 2, 8, 8, Softmax(0.5), rope=RopeLayout(torch.ones(4)))
FACTS = ModelFacts("toy", "f", (LAYER, LAYER), torch.float32, torch.device("cpu"), 512)
WINDOWED = replace(FACTS, layers=(LAYER, replace(LAYER, softmax=Softmax(0.5, window=8))))
UNKNOWN = replace(FACTS, layers=(LAYER, replace(LAYER, rope=None)))


class Odd(Knorm):
    """Knorm with the traits that a test gives it."""

    name = "odd"


def odd(**traits):
    return type("Odd", (Odd,), traits)()


@pytest.mark.parametrize(
    "policy", ["knorm", "paged_eviction", "quest", "pyramidkv", "ada_kv", "streaming_llm(positions=cache)"]
)
def test_a_plain_model_has_all(policy):
    check_policy(make_policy(policy), FACTS)


@pytest.mark.parametrize(
    ("policy", "facts", "message"),
    [
        ("quest", WINDOWED, "quest reads some blocks per head.*layer 1 of 'toy' is one"),
        ("ada_kv", WINDOWED, "ada_kv keeps unequal numbers of tokens per head.*layer 1 of 'toy' is one"),
        ("streaming_llm(positions=cache)", UNKNOWN, "needs the rotation of 'toy'.*no rotation.*layer 1"),
    ],
)
def test_what_the_model_cannot_serve(policy, facts, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check_policy(make_policy(policy), facts)


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        (
            {"eviction_method": EvictionMethod.CELLS, "needs": frozenset({Signal.ATTENTION_MASS})},
            "attention mass needs equal ones",
        ),
        ({"eviction_method": EvictionMethod.CELLS, "cache_relative": True}, "slot for its position"),
        ({"eviction_method": EvictionMethod.BLOCKS, "cache_relative": True}, "slot for its position"),
    ],
)
def test_contradictions(traits, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check_policy(odd(**traits), FACTS)


def test_the_message_is_one_sentence_that_names_a_way_out():
    with pytest.raises(InvalidArgumentError) as caught:
        check_policy(make_policy("quest"), WINDOWED)
    assert str(caught.value).endswith("disable_hybrid_kv_cache_manager and kv_offloading_size.")
