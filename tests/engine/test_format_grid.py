"""Every policy over every KV format: it runs with finite scores, or is refused as docs/formats.md has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
import torch
from settings import assert_idle

from kvreclaim import LLM, CompressionConfig
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression.policy import Wrapper
from kvreclaim.compression.registry import make_policy, policy_class, policy_names
from kvreclaim.config import KV_CACHE_DTYPES
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model_paths import STATS_FILE
from kvreclaim.ops.formats import FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
EXCLUDED = {m[1]: (m[2], m[3]) for m in ROW.finditer(PAGE.split("## What composes")[1].split("\n## ")[0])}
PLAIN = ("fp32", "bf16", "fp16")


def built_in() -> list[str]:
    return [name for name in policy_names() if policy_class(name).__module__.startswith("kvreclaim.")]


def spec(name: str) -> str:
    """Wrappers around a policy that all of them take."""
    if not issubclass(policy_class(name), Wrapper):
        return name
    return f"{name}(knorm, first=2)" if name == "protect" else f"{name}(knorm)"


POLICIES = [*map(spec, built_in()), "streaming_llm(positions=cache)"]


def refusal(policy: str, form: str, *, latent: bool) -> str | None:
    """Words of the refusal that the page promises; None: it runs."""
    for name, (formats, _) in EXCLUDED.items():
        if policy == name or policy.startswith(f"{name}("):
            if "MLA" in formats and latent:
                return "one latent for all heads"
            if f"`{form}`" in formats:
                return "would round them anew"
    return None


def small(policy: str) -> CompressionConfig:
    return CompressionConfig(policy, budget=48, interval=16, sinks=2, recent=8)


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> dict[tuple[str, str], LLM]:
    """Engines by family and format, over the same weights with statistics beside them."""
    made: dict[tuple[str, str], LLM] = {}
    for family, changes in (("qwen3", {"head_dim": 32}), ("deepseek-v3", {})):
        path = tiny.save_model(family, tmp_path_factory.mktemp(family), **changes)
        llm = LLM(path, dtype="float32", device="cpu", num_blocks=24)
        stats = calibrate(llm.loaded, tiny.prompts((150, 80), seed=5), num_centers=4, kvzap="linear")
        stats.save(path / STATS_FILE)
        llm = LLM(path, dtype="float32", device="cpu", num_blocks=24)  # found at the start
        made |= {(family, form): llm.sibling(kv_cache_dtype=form) for form in FORMATS}
    return made


def check(llm: LLM, policy: str, *, latent: bool) -> None:
    """96 tokens under a budget of 48."""
    form = llm.engine.kv_format.name
    if (words := refusal(policy, form, latent=latent)) is not None:
        with pytest.raises(InvalidArgumentError, match=words):
            llm.compressor(small(policy))
        return
    prompt, answer = tiny.prompts((64, 32), seed=3)
    (out,) = llm.score([prompt], [answer], small(policy))
    assert out.error is None
    assert torch.tensor(out.logprobs).isfinite().all()
    assert (out.metrics.compactions > 0) == make_policy(policy).eviction_method.evicts
    assert_idle(llm)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_pair_runs_or_is_refused_as_documented(engines, policy, form):
    check(engines["qwen3", form], policy, latent=False)


@pytest.mark.parametrize("form", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("policy", POLICIES)
def test_over_latents(engines, policy, form):
    llm = engines["deepseek-v3", form]
    if not llm.loaded.facts.layers[0].latent:
        pytest.skip("this version of transformers keeps no latents")
    check(llm, policy, latent=True)


def test_the_page_names_what_there_is():
    for name, (formats, reason) in EXCLUDED.items():
        make_policy(name)
        named = set(re.findall(r"`([\w+]+)`", formats))
        assert named <= set(FORMATS) - set(PLAIN) or "MLA" in formats
        assert reason.strip()
    assert len(EXCLUDED) >= 2
    table = PAGE.split("## Which format")[0]
    assert set(re.findall(r"`([\w+]+)`", table)) >= set(KV_CACHE_DTYPES)


def test_the_table_of_bytes_is_that_of_the_formats():
    names = ("bf16", "int8", "int8+int4", "int4", "turboquant4")
    rows = re.findall(r"^\| (D|MLA) ([\d +]+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for _, dims, cells in rows:
        k_dim, v_dim = ([int(part) for part in dims.split("+")] * 2)[:2]
        for name, cell in zip(names, cells.split(" | "), strict=True):
            size, ratio = FORMATS[name].unit_bytes(k_dim, v_dim, 16), cell.partition("(")[2][:5]
            assert int(cell.split()[0]) == size
            assert not ratio or float(ratio) == round(FORMATS["bf16"].unit_bytes(k_dim, v_dim, 16) / size, 3)
