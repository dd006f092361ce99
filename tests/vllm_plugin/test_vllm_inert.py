"""Installed, but without "kv_compression", the plugin changes nothing: vLLM's own scheduler and pool decide
what they decided.

With VLLM_TESTS naming a checkout of vLLM's version, its own tests run with and without the plugin as well:

    git clone --depth 1 --branch v0.32.0 https://github.com/vllm-project/vllm /tmp/vllm
    VLLM_TESTS=/tmp/vllm pytest -c tests/vllm_plugin/pytest.ini tests/vllm_plugin/test_vllm_inert.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["VLLM_PLUGINS"] = ""  # loaded here, by hand, when its turn comes
os.environ.pop("KVRECLAIM_VLLM", None)

from random_schedules import END, history, make_request, pool_history, scheduler_of

SEEDS = (0, 1, 2)
OWN_TESTS = tuple(
    f"tests/v1/core/test_{name}.py"
    for name in (
        "kv_cache_utils",
        "prefix_caching",
        "scheduler",
        "async_scheduler",
        "single_type_kv_cache_manager",
    )
)
LIMITED = "tests/v1/core/test_kv_cache_utils.py::test_is_kv_cache_spec_uniform"
"""Starts a process with a time limit, which a busy machine does not keep."""
RUN_OWN_TESTS = """
import sys
import vllm.engine.arg_utils, vllm.v1.core.kv_cache_manager  # the installed ones, not those of the checkout
if sys.argv[1] == "with":
    from kvreclaim.integrations.vllm.entry.plugin import register
    register()
import pytest
options = "--noconftest -p no:cacheprovider -c /dev/null --rootdir . -q -W ignore"
sys.exit(pytest.main([*options.split(), *sys.argv[2:]]))
"""


def _names(model: Path) -> tuple[object, ...]:
    """The classes that a plugin would change in a configuration, and its hash."""
    config = scheduler_of(model).vllm_config
    return config.scheduler_config.scheduler_cls, config.parallel_config.worker_cls, config.compute_hash()


def wrapped() -> tuple[object, object]:
    """The two functions that the plugin wraps, as they are now."""
    import start_check
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs.create_engine_config, getattr(start_check.MODULE, start_check.NEEDED)


@pytest.fixture(scope="module")
def before(tiny_model) -> Iterator[dict[object, object]]:
    """Everything without the plugin; then it is registered, which must have an effect to mean anything."""
    own = wrapped()
    traces: dict[object, object] = {("scheduler", seed): history(tiny_model, seed) for seed in SEEDS}
    traces |= {("async", seed): history(tiny_model, seed, asynchronous=True) for seed in SEEDS}
    traces |= {("pool", seed): list(pool_history(seed)) for seed in SEEDS}
    traces["config"] = _names(tiny_model)
    assert own == wrapped()
    from kvreclaim.integrations.vllm.entry.plugin import register

    register()
    assert all(now is not before for now, before in zip(wrapped(), own, strict=True))
    return traces


@pytest.mark.parametrize("kind", ["scheduler", "async"])
def test_the_histories_show_what_could_differ(before, kind):
    steps = [step for seed in SEEDS for step in before[kind, seed]]
    assert any(step["preempted"] for step in steps)
    assert any(found for step in steps for (_, _, found) in step["new"])  # prefix hits
    assert any(answer[2] is not None for step in steps for answer in step["answers"])
    assert len({step["free"][0] for step in steps if step["free"]}) > 10


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_scheduler_decides_the_same(before, tiny_model, seed, asynchronous):
    name = "async" if asynchronous else "scheduler"
    assert history(tiny_model, seed, asynchronous=asynchronous) == before[name, seed]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_block_pool_does_the_same(before, seed):
    assert list(pool_history(seed)) == before["pool", seed]


def test_the_configuration_is_the_same(before, tiny_model):
    assert _names(tiny_model) == before["config"]


def test_another_order_of_freed_blocks_would_be_seen(before, tiny_model, monkeypatch):
    """The comparison can fail."""
    from vllm.v1.core.block_pool import BlockPool

    inner = BlockPool.free_blocks
    monkeypatch.setattr(BlockPool, "free_blocks", lambda self, blocks: inner(self, list(blocks)[::-1]))
    assert history(tiny_model, SEEDS[0]) != before["scheduler", SEEDS[0]]
    assert list(pool_history(SEEDS[0])) != before["pool", SEEDS[0]]


def test_nothing_of_the_plugin_is_in_the_scheduler(before, tiny_model):
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = scheduler_of(tiny_model)
    assert type(scheduler) is Scheduler
    assert type(scheduler.kv_cache_manager) is KVCacheManager
    assert not hasattr(scheduler, "reclaim")
    scheduler.add_request(make_request("alone", [END - 1] * 20, 4))
    assert not hasattr(scheduler.schedule(), "kvreclaim")


@pytest.mark.skipif("VLLM_TESTS" not in os.environ, reason="VLLM_TESTS names no checkout of vLLM")
def test_vllms_own_tests_end_as_without_it(tmp_path):
    """Tests that want weights or processors from the hub fail in both runs."""
    without, with_plugin = (_own_tests(side, tmp_path) for side in ("without", "with"))
    assert sum(outcome == "passed" for outcome in without.values()) > 400
    assert with_plugin == without


def _own_tests(side: str, folder: Path) -> dict[str, str]:
    """Outcome by test."""
    checkout, report = Path(os.environ["VLLM_TESTS"]), folder / f"{side}.xml"
    _write_opt_config(folder / "hub" / "models--facebook--opt-125m")
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            RUN_OWN_TESTS,
            side,
            f"--junitxml={report}",
            "--deselect",
            LIMITED,
            *OWN_TESTS,
        ],
        cwd=checkout,
        env={**os.environ, "HF_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.is_file(), done.stderr[-3000:]
    cases = ElementTree.parse(report).iter("testcase")
    return {
        f"{case.get('classname')}::{case.get('name')}": next((c.tag for c in case), "passed")
        for case in cases
    }


def _write_opt_config(cached: Path) -> None:
    """Write the configuration where the hub's client looks for it when it is offline."""
    from transformers import OPTConfig

    snapshot = cached / "snapshots" / "0"
    snapshot.mkdir(parents=True, exist_ok=True)
    (cached / "refs").mkdir(exist_ok=True)
    (cached / "refs" / "main").write_text("0")
    OPTConfig(architectures=["OPTForCausalLM"], dtype="float16").save_pretrained(snapshot)
