"""What a compression's text says without torch is what its classes say."""

from __future__ import annotations

import json
import re

import pytest

from kvreclaim.compression import spec_table
from kvreclaim.compression.policy import window_of
from kvreclaim.compression.registry import make_policy, policy_names
from kvreclaim.compression.spec.traits import footprint, traits
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

SPECS = (
    *policy_names(),
    "snapkv(window=7)",
    "snapkv(when=prefill)",
    "r_kv(window=3, weight=0.2)",
    "ada_kv(tova)",
    "pyramidkv(r_kv(window=4), beta=10)",
    "segments(snapkv(window=9), 4)",
    "protect(inner=paged_eviction, first=8)",
    "critical(protect(segments(h2o)))",
)


@pytest.mark.parametrize("spec", SPECS)
def test_the_table_says_what_the_classes_say(spec):
    policy, found = make_policy(spec), traits(spec)
    window = window_of(policy)
    assert (found.eviction_method, found.prompt_only, found.window) == (
        policy.eviction_method,
        policy.prompt_only,
        window,
    )


def test_the_table_is_what_the_classes_write():
    """`python -m kvreclaim.compression.spec_table` writes it anew."""
    assert json.loads(spec_table.FILE.read_text()) == json.loads(json.dumps(spec_table.rows()))


@pytest.mark.parametrize(
    "spec",
    [
        "knorm(kep=large)",
        "tova(x=1)",
        "snapkv(7)",
        "segments(snapkv, n=4, n=5)",
        "segments(4)",
        "segments(snapkv, 4, 0.5, 3)",
        "segments(n=4, snapkv)",
        "snapkv(window=tova(a=1))",
    ],
)
def test_what_the_classes_refuse_is_refused_with_their_words(spec):
    with pytest.raises(InvalidArgumentError) as theirs:
        make_policy(spec)
    with pytest.raises(InvalidArgumentError) as ours:
        traits(spec)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("inner", ["full", "paged_eviction", "ada_kv", "quest", "knorm"])
@pytest.mark.parametrize("wrapper", [name for name, row in spec_table.rows().items() if "wraps" in row])
def test_wrappers_take_what_their_classes_take(wrapper, inner):
    spec = f"{wrapper}({inner})"
    try:
        make_policy(spec)
    except InvalidArgumentError as error:
        reason, _, _ = str(error).partition(";")
        with pytest.raises(InvalidArgumentError, match=re.escape(reason)):
            traits(spec)
    else:
        traits(spec)


def test_a_spec_with_settings():
    found = footprint("triattention:budget=512,interval=64", block_size=32, max_chunk=256)
    assert (found.eviction_method, found.budget, found.interval, found.sinks) == (
        EvictionMethod.COMPACT,
        512,
        64,
        4,
    )
    assert (found.decode_cap, found.prompt_cap) == (576, 768)
    assert footprint("ada_kv(snapkv, alpha=0.1)").budget == 2048
    assert footprint("shares(random, by=static):budget=452").budget == 448
    assert footprint("pyramidkv:budget=137,sinks=8,recent=128", block_size=64).budget == 192
    assert footprint("snapkv:budget=452").budget == 452
    assert footprint("snapkv(window=8) : budget=300 , recent=16").window == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unheard_of:budget=512", "'unheard_of' is not built in"),
        ("knorm:size=512", "the setting 'size=512'; after the colon write budget, interval"),
        ("knorm:budget", "the setting 'budget'"),
        ("knorm:budget=many", "budget is 'many'; it must be at least 1 token"),
        ("knorm:budget=0", "budget is '0'"),
        ("knorm:budget=100", r"sinks \+ recent = 132 are always kept"),
        ("knorm(", "it ends where a value must follow"),
        ("segments(4)", "is given 4 to wrap"),
        ("knorm(kep=large)", "policy knorm has no option 'kep'; its options are keep"),
        ("tova(x=1)", "policy tova has no option 'x'; it has no options"),
        ("snapkv(7)", "wraps no other policy and takes its options by name"),
        ("segments(snapkv, n=4, n=5)", "is given the option 'n' twice"),
        ("ada_kv:budget=512,interval=8", "interval is 8 tokens, but under ada_kv heads trade whole blocks"),
        ("paged_eviction:budget=140", "paged_eviction goes by whole blocks of 16"),
        ("auto:budget=512", "policy auto stands for a policy"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        footprint(text)
