"""Options that do not go with policies that read layers' inputs, and what `auto` stands for then.
Configurations only, no engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from configs import NGRAM, make_config, make_model
from test_vllm_refusals import qwen3

from kvreclaim.compression.registry import make_policy
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.trial import Trial, TrialOutcome, TrialScore
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.refusals.table import refuse_signals

SNAPKV = {"policy": "ada_kv(snapkv)", "budget": 256, "interval": 64}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"enforce_eager": False}, "torch.compile and CUDA graphs .* add --enforce-eager"),
        ({"speculative_config": NGRAM}, "--speculative-config .* queries of drafts"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size .* tokens that are loaded"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 .* use one of auto, float16, bfloat16"),
        ({"compression": {**SNAPKV, "snapshots": True}}, '"snapshots" .* it is not tested'),
    ],
)
def test_beside_these_policies_these_are_refused(
    options: dict[str, Any], word: str, tiny_model: Path
) -> None:
    with pytest.raises(
        InvalidArgumentError, match=word.replace(" .*", " beside a policy that looks at .*", 1)
    ):
        make_config(tiny_model, **{"compression": SNAPKV, **options})


def test_the_v2_runner_is_refused() -> None:
    config = SimpleNamespace(use_v2_model_runner=True)
    with pytest.raises(InvalidArgumentError, match=r"the V2 model runner .* VLLM_USE_V2_MODEL_RUNNER=0"):
        refuse_signals(config, make_policy("tova"), snapshots=False)


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    config = qwen3(sliding_window=64, use_sliding_window=True, max_window_layers=1)
    config.num_hidden_layers, config.layer_types = 2, ["full_attention", "sliding_attention"]
    with pytest.raises(InvalidArgumentError, match="sliding windows beside a policy that looks at recent"):
        make_config(make_model(tmp_path / "model", config, "Qwen3ForCausalLM"), SNAPKV)


def test_auto_is_the_best_that_runs_here(tiny_model: Path, tiny_stats: Path, tmp_path: Path) -> None:
    """A trial won by hidden states: they are looked at where hooks run, else the next one serves."""
    outcomes = tuple(
        TrialOutcome(policy=policy, fraction=0.2, budget=64, once=once, once_right=0, again=1, again_right=0)
        for policy, once in (("shares(kvzap)", 1.0), ("shares(surrogate)", 1.1))
    )
    full = TrialScore(once=1, once_right=0, again=1, again_right=0)
    trial = Trial(documents=1, tokens=320, full=full, outcomes=outcomes)
    QueryStats.load(tiny_stats).with_trial(trial).save(path := tmp_path / "stats.safetensors")
    for eager, policy in ((True, "shares(kvzap)"), (False, "shares(surrogate)")):
        compression = {"policy": "auto", "budget": 256, "stats": str(path)}
        config = make_config(tiny_model, compression, enforce_eager=eager)
        assert config.additional_config["kv_compression"]["policy"] == policy
