"""What the package ships for the model that it fetches: whole, small, of that model, with a verdict."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.cli.main import app
from kvreclaim.compression.stats import QueryStats
from kvreclaim.model_paths import REAL_MODEL, STATS_FILE, shipped_statistics


@pytest.fixture(scope="module")
def real() -> QueryStats:
    return QueryStats.load(shipped_statistics(REAL_MODEL))


def test_the_real_models_best_is_a_learned_score_with_unequal_heads(real) -> None:
    trial = real.metadata.trial
    assert trial.best == "shares(surrogate)"
    assert trial.reads_back
    assert trial.questions > 0
    assert {"query_mixture", "triattention"} <= set(trial.policies)
    assert real.surrogate is not None
    assert real.head_shares is not None
    assert shipped_statistics(REAL_MODEL).stat().st_size < 2e6


def test_the_demo_models_best_is_query_mixtures_with_unequal_heads() -> None:
    """It does not read back what is repeated, and no candidate that it can have was left out."""
    trial = QueryStats.load(demo_model() / STATS_FILE).metadata.trial
    assert trial.best == "shares(query_mixture, by=static)"
    assert trial.loss("query_mixture") < trial.loss("shares(surrogate)")
    assert not trial.reads_back
    assert not trial.refused
    llm = LLM(demo_model(), num_blocks=64, compression=CompressionConfig(budget=64, recent=16))
    assert llm.compression.policy == trial.best


def test_a_tenth_of_the_bytes_is_of_codes(real, real_dir) -> None:
    """The trial's best format there, in the commands, too."""
    assert real.metadata.keys
    form = real.metadata.trial.format_at(0.1)
    assert form == "int4"
    options = ("--kv-budget", "10%", "--kv-compression-stats", str(shipped_statistics(REAL_MODEL)))
    given = (
        "generate",
        "--model",
        str(real_dir),
        "--prompt",
        "One, two, three.",
        "--max-tokens",
        "1",
        *options,
    )
    result = CliRunner().invoke(app, [*given, "--kv-recent", "8"])
    assert result.exit_code == 0, result.output
    (kernels,) = [line for line in result.stderr.splitlines() if line.startswith("kernels: ")]
    assert "keys centred and scaled" in kernels
    assert kernels.endswith(f"KV {form}")


def test_they_are_the_fetched_models(real, real_dir) -> None:
    config = CompressionConfig(budget=112, recent=32, interval=16, stats=shipped_statistics(REAL_MODEL))
    llm = LLM(real_dir, num_blocks=64, max_model_len=512, compression=config)
    prompt = llm.tokenizer.encode("A machine that is told a thing twice knows it better. " * 12)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24))
    assert output.error is None
    assert output.metrics.tokens_evicted > 0
    assert llm.compression.policy == real.metadata.trial.best
