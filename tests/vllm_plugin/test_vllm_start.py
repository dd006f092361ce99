"""How vLLM starts with the plugin: untouched without "kv_compression". Configurations only, no engine."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import start_check
import torch
import vllm
from configs import SCHEDULER, SETTINGS, make_config
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.entry import plugin
from kvreclaim.integrations.vllm.settings import family, model_statistics
from kvreclaim.integrations.vllm.settings.model_statistics import ModelToLoad

front = family.module("front")
check_request, take_over = front.check_request, front.take_over
ENTRY = "kvreclaim.integrations.vllm.entry"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVRECLAIM_VLLM", raising=False)
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))  # without statistics


# With compression.


def test_the_configuration_names_our_scheduler_and_worker_and_one_line_says_so(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "logger", logging.getLogger("out of reach of vLLM's logging"))
    caplog.set_level(logging.INFO)
    config = make_config(tiny_model)
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.parallel_config.worker_cls == f"{ENTRY}.cpu_worker.ReclaimCPUWorker"
    lines = [record.getMessage() for record in caplog.records if record.name == plugin.logger.name]
    assert len(lines) == 1
    for part in ("kvreclaim 0.", f"vLLM {vllm.__version__}", "streaming_llm", "budget 256", "interval 64"):
        assert part in lines[0]


def test_without_statistics_the_model_is_handed_to_calibration_as_vllm_will_load_it(
    tiny_model: Path, tiny_stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[ModelToLoad, bool]] = []

    def find(model: ModelToLoad, calibrate: bool) -> str:
        calls.append((model, calibrate))
        return str(tiny_stats)

    monkeypatch.setattr(model_statistics, "find_statistics", find)
    config = make_config(tiny_model, {"policy": "query_mixture", "budget": 256})
    assert config.additional_config["kv_compression"]["stats"] == str(tiny_stats)
    arguments = {"dtype": "bfloat16", "device": "cpu", "hf_overrides": "{}"}
    assert calls == [(ModelToLoad(tiny_model, arguments), True)]


def test_the_variable_asks_as_well_and_travels_in_the_configuration(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECLAIM_VLLM", json.dumps(SETTINGS))
    config = make_config(tiny_model, None)
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.additional_config["kv_compression"]["budget"] == 256
    assert config.additional_config == make_config(tiny_model, SETTINGS).additional_config


@pytest.mark.parametrize(
    ("variable", "compression", "word"),
    [
        ("", None, "no JSON"),
        ('{"policy": "streaming_llm", "budget": 512}', SETTINGS, "different things"),
        (None, {"policy": "streaming_llm", "budgets": 256}, "no field 'budgets'"),
        (None, {"policy": "h2o", "budget": 256}, "which vLLM does not keep"),
        (None, {"policy": "query_mixture", "calibrate": False}, "needs query statistics"),
        (None, "streaming_llm", "must be an object"),
    ],
)
def test_wrong_settings_are_refused(
    variable: str | None,
    compression: object,
    word: str,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("KVRECLAIM_VLLM", variable)
    with pytest.raises(InvalidArgumentError, match=word):
        make_config(tiny_model, compression)


def test_taking_over_again_follows_the_kind_of_scheduling(tiny_model: Path) -> None:
    config = make_config(tiny_model)
    worker = config.parallel_config.worker_cls
    take_over(config)
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    config.scheduler_config.async_scheduling = True
    take_over(config)
    assert config.scheduler_config.scheduler_cls.endswith(".AsyncReclaimScheduler")
    assert config.parallel_config.worker_cls == worker


def test_a_gpu_worker_becomes_our_gpu_worker(tiny_model: Path) -> None:
    config = make_config(tiny_model, None)
    config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
    take_over(config)
    assert config.parallel_config.worker_cls == f"{ENTRY}.gpu_worker.ReclaimWorker"


# Without compression.

INERT = """
import importlib, inspect, json, sys
import vllm
from vllm import EngineArgs, LLM
from vllm.v1.core import kv_cache_utils, kv_cache_manager, block_pool, single_type_kv_cache_manager
from vllm.v1.core.sched import scheduler, async_scheduler, output
from vllm.v1.engine import input_processor, output_processor, llm_engine, core
from vllm.v1.metrics import loggers, stats

importlib.import_module(sys.argv[2])

def functions():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm") and module is not None:
            for key, value in list(vars(module).items()):
                if inspect.isfunction(value):
                    found[name, key] = value
                elif inspect.isclass(value) and value.__module__ == name:
                    found |= {(name, key, k): v for k, v in vars(value).items() if not k.startswith("_abc")}
    return found

arguments = json.loads(sys.argv[1])
before = functions()
workers = {name for name in sys.modules if name.startswith("vllm.v1.worker")}
from vllm.plugins import load_general_plugins
load_general_plugins()
new_workers = {name for name in sys.modules if name.startswith("vllm.v1.worker")} - workers
config = EngineArgs(**arguments).create_engine_config()
after = functions()
changed = sorted(":".join(key) for key, value in before.items() if after[key] is not value)
print("RESULT " + json.dumps({
    "changed": changed,
    "new_workers": sorted(new_workers),
    "ours": sorted(name for name in sys.modules if name.startswith("kvreclaim")),
    "scheduler": config.scheduler_config.scheduler_cls,
    "worker": config.parallel_config.worker_cls,
    "additional": config.additional_config,
}))
"""
WRAPPED = {
    "vllm.engine.arg_utils:EngineArgs:create_engine_config",
    f"{start_check.MODULE.__name__}:{start_check.NEEDED}",
}


def start(model: Path, plugins: str | None, **more: Any) -> dict[str, Any]:
    """Start vLLM's front end in a process of its own, and look at what has changed there."""
    arguments = {
        "model": str(model),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 1024,
        **more,
    }
    environment = {name: text for name, text in os.environ.items() if name != "VLLM_PLUGINS"}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    done = subprocess.run(
        [sys.executable, "-c", INERT, json.dumps(arguments), start_check.MODULE.__name__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def test_without_compression_two_functions_are_wrapped_and_nothing_else_changes(tiny_model: Path) -> None:
    installed = start(tiny_model, None)
    bare = start(tiny_model, "", additional_config={"kv_compression": SETTINGS})  # VLLM_PLUGINS is empty
    # vLLM itself replaces some attributes while it makes a configuration: what is ours is the rest.
    assert set(installed["changed"]) - set(bare["changed"]) == WRAPPED
    assert not WRAPPED & set(bare["changed"])
    assert installed["new_workers"] == []
    assert installed["additional"] == {}
    for result in (installed, bare):
        assert result["scheduler"] is None
        assert result["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    heavy = {"kvreclaim.compression", "kvreclaim.model", "kvreclaim.engine", "kvreclaim.ops"}
    assert not heavy & set(installed["ours"])
    assert bare["ours"] == []


# The pool's start check.


def needed_blocks(config: Any, block_size: int = 32) -> int:
    full = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["model.layers.0.attn", "model.layers.1.attn"], full)]
    config.cache_config.kv_cache_layout = "LBNHC"
    needed, per_block = start_check.needed(config, groups), start_check.per_block(config, groups)
    assert needed % per_block == 0
    return int(needed // per_block)


def test_the_start_check_asks_for_budget_interval_and_one_chunk(tiny_model: Path) -> None:
    long = {"max_model_len": 8192, "max_num_batched_tokens": 512}
    assert needed_blocks(make_config(tiny_model, None, **long)) == 256
    assert needed_blocks(make_config(tiny_model, **long)) == -(-(256 + 64 - 1 + 512) // 32)
    tight = {**SETTINGS, "interval": 1}  # passes come a block apart at least
    assert needed_blocks(make_config(tiny_model, tight, **long)) == -(-(256 + 32 - 1 + 512) // 32)
    short = {"max_model_len": 512, "max_num_batched_tokens": 512}
    assert needed_blocks(make_config(tiny_model, **short)) == 16


def test_the_start_check_is_vllms_own_where_nothing_is_evicted(tiny_model: Path) -> None:
    long = {"max_model_len": 8192, "max_num_batched_tokens": 512}
    assert needed_blocks(make_config(tiny_model, {"policy": "full"}, **long)) == 256


# A request's own settings, without an engine.


def request(extra: object, prompt: int = 100, max_tokens: int = 100, resumable: bool = False) -> Any:
    extra_args = None if extra is None else {"kv_compression": extra}
    params = SamplingParams(max_tokens=max_tokens, extra_args=extra_args)
    ids = list(range(prompt))
    return SimpleNamespace(
        sampling_params=params, prompt_token_ids=ids, prompt_embeds=None, resumable=resumable
    )


@pytest.mark.parametrize("extra", [None, "on", "off", {"budget": 200}, '{"budget": 200}', '"off"'])
def test_good_settings_pass(extra: object, tiny_model: Path) -> None:
    check_request(request(extra), make_config(tiny_model))


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ("perhaps", "no JSON"),
        (3, "must be 'off', 'on' or an object"),
        ({"budgets": 1}, "no field 'budgets'"),
        ({"budget": 512}, "started with 256"),
        ({"interval": 128}, "started with 64"),
        ({"stats": "other"}, "loaded when the server starts"),
        ({"policy": "query_mixture"}, "has not loaded"),
        ({"policy": "nonsense"}, "nonsense"),
        ({"budget": "many"}, "budget"),
    ],
)
def test_bad_settings_are_this_requests_error(extra: object, word: str, tiny_model: Path) -> None:
    with pytest.raises(VLLMValidationError, match=word) as caught:
        check_request(request(extra), make_config(tiny_model))
    assert isinstance(caught.value, VLLMClientError)  # HTTP 4xx


def test_a_request_that_keeps_everything_must_fit_the_pool(tiny_model: Path) -> None:
    config = make_config(tiny_model, max_model_len=8192)
    config.cache_config.block_size = 32
    config.cache_config.num_gpu_blocks = 33
    check_request(request("off", 1000, 24), config)
    check_request(request("on", 4000, 100), config)
    with pytest.raises(VLLMValidationError, match="the KV cache holds 1024"):
        check_request(request("off", 1000, 25), config)
    config.parallel_config.data_parallel_size = 3  # vLLM adds up the blocks of all engines
    with pytest.raises(VLLMValidationError, match="the KV cache holds 320"):
        check_request(request("off", 300, 24), config)


def test_a_streaming_session_cannot_be_compressed(tiny_model: Path) -> None:
    config = make_config(tiny_model)
    check_request(request(None, resumable=True), config)
    with pytest.raises(VLLMValidationError, match="streaming input"):
        check_request(request({"budget": 200}, resumable=True), config)


@pytest.mark.parametrize("extra", [None, "off"])
def test_a_streaming_session_must_fit_the_pool_at_its_longest(extra: object, tiny_model: Path) -> None:
    """The input still to come is of unknown length."""
    config = make_config(tiny_model, max_model_len=1024)
    config.cache_config.block_size = 32
    config.cache_config.num_gpu_blocks = 33
    check_request(request(extra, 10, 10, resumable=True), config)
    config.cache_config.num_gpu_blocks = 32
    with pytest.raises(VLLMValidationError, match=r"streaming input .* max_model_len 1024"):
        check_request(request(extra, 10, 10, resumable=True), config)
