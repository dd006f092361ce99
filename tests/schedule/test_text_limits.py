"""What a compression's text says without torch is what its classes say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvreclaim.compression import Signal, make_policy, policy_names
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.limits import footprint, traits
from kvreclaim.schedule.way import Way

SPECS = (
    *policy_names(),
    "snapkv(window=7)",
    "snapkv(when=prefill)",
    "r_kv(window=3, weight=0.2)",
    "evict-only(h2o)",
    "evict-only(snapkv(when=prefill, window=5))",
    "ada_kv(tova)",
    "pyramidkv(r_kv(window=4), beta=10)",
    "segments(snapkv(window=9), 4)",
    "protect(inner=paged_eviction, first=8)",
    "critical(protect(segments(h2o)))",
)


@pytest.mark.parametrize("spec", SPECS)
def test_the_table_says_what_the_classes_say(spec):
    policy, found = make_policy(spec), traits(spec)
    window = max(1, policy.query_window) if Signal.RECENT_QUERIES in policy.needs else 1
    if Signal.ATTENTION_MASS in policy.needs:
        window = None
    assert (found.way, found.prompt_only, found.window) == (policy.way, policy.prompt_only, window)


def test_a_spec_with_settings():
    found = footprint("triattention:budget=512,interval=64", block_size=32, max_chunk=256)
    assert (found.way, found.budget, found.interval, found.sinks) == (Way.COMPACT, 512, 64, 4)
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
        ("knorm:budget=many", "budget is 'many'; it must be a number of tokens"),
        ("knorm:budget=0", "budget is 0"),
        ("knorm:budget=100", r"sinks \+ recent = 132 are always kept"),
        ("knorm(", "it ends where a value must follow"),
        ("segments(4)", "is given 4 to wrap"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        footprint(text)


def test_the_rooms_that_decide_load_without_torch():
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'transformers'): sys.modules[name] = None\n"
        "import kvreclaim.config, kvreclaim.memory, kvreclaim.schedule\n"
        "from kvreclaim.schedule.limits import footprint\n"
        "print(footprint('triattention:budget=512,interval=128').decode_cap)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "640"
