"""Log-probabilities of a compressed request in vLLM: those of transformers with the same tokens dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, Engines
from models import make_tiny_model, random_prompts
from oracle import Kept, check_logprobs, full_logprobs, logprobs_with_drops, passes_of
from transformers import AutoModelForCausalLM

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.model.loader import load_model
from kvreclaim.ops.key_source import DenseSource

SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 32}
OUTPUT = 160

CASES: dict[str, dict[str, Any]] = {
    "query_mixture": {},
    "query_mixture-union": {"mode": "union"},
    "query_mixture-per_head": {"mode": "per_head"},
    "query_mixture-protect_prompt": {"protect_prompt": True},
    "query_mixture-collapsed": {"options": {"form": "collapsed"}},
    "triattention": {"policy": "triattention"},
    "streaming_llm": {"policy": "streaming_llm"},
    "streaming_llm-no-sinks": {"policy": "streaming_llm", "sinks": 0, "recent": 100},
    "knorm": {"policy": "knorm"},
    "keydiff": {"policy": "keydiff"},
    "lagkv": {"policy": "lagkv"},
    "random": {"policy": "random"},
    "smaller-budget": {"policy": "keydiff", "budget": 70, "interval": 33},
    "expected_attention": {"policy": "expected_attention"},
    "expected_attention-per_head": {"policy": "expected_attention", "mode": "per_head"},
}
LONELY = ("expected_attention",)
"""Policies whose statistics the engine loads only if it is started with them."""


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tiny_stats: Path) -> Iterator[Engines]:
    engines = Engines(tiny_model, stats=str(tiny_stats), **SETTINGS)
    yield engines
    engines.close()


def serving(engines: Engines, policy: str) -> Engine:
    """An engine that has the statistics which this policy needs."""
    return engines.having(policy if policy in LONELY else "query_mixture")


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_logprobs_are_those_of_the_tokens_kept(
    engines: Engines, tiny_model: Path, settings: dict[str, Any]
) -> None:
    engine = serving(engines, settings.get("policy", "query_mixture"))
    prompts = random_prompts((600, 450), seed=1)
    with engine.traced() as trace:
        answers = engine.generate(prompts, OUTPUT, settings=settings or None)
    for prompt, answer in zip(prompts, answers, strict=True):
        passes = passes_of(trace, answer.request_id)
        in_prompt = sum(kept.num_computed < len(prompt) for kept in passes)
        assert in_prompt >= 1, "no pass between two chunks of the prompt"
        assert len(passes) - in_prompt >= 2, "less than two passes while output was made"
        check_logprobs(tiny_model, prompt, answer.tokens, answer.logprobs, passes)
    assert engine.is_empty()


@pytest.mark.parametrize("mode", ["per_layer_head", "union"])
@pytest.mark.parametrize("name", ["expected_attention", "query_mixture", "triattention", "keydiff", "lagkv"])
def test_first_choice_is_the_librarys_own(
    engines: Engines, tiny_model: Path, tiny_stats: Path, name: str, mode: str
) -> None:
    """The same choice on transformers' keys and values, but for what bf16 ranks otherwise."""
    engine = serving(engines, name)
    prompt = random_prompts([256], seed=4)[0]
    with engine.traced() as trace:
        [answer] = engine.generate([prompt], 2, settings={"policy": name, "mode": mode})
    [kept] = passes_of(trace, answer.request_id)
    assert kept.num_computed == 256
    config = CompressionConfig(policy=name, mode=mode, **SETTINGS, stats=tiny_stats)
    compressor = Compressor(config, load_model(tiny_model, dtype="float32", device="cpu").facts)
    keys_values = cached(tiny_model, prompt)
    own = compressor.choose(lambda layer: DenseSource(*keys_values[layer]), 256, 256, 256, first=True)
    own = own.expand_as(kept.positions).long()
    shared = (kept.positions.long()[..., None] == own[..., None, :]).any(-1)
    assert shared.float().mean(-1).min() >= 0.95


def test_recency_is_exact(engines: Engines) -> None:
    """Each pass of streaming_llm keeps the first four and the last, up to a block more than the budget."""
    engine = serving(engines, "streaming_llm")
    with engine.traced() as trace:
        [answer] = engine.generate(
            random_prompts([500], seed=2), OUTPUT, settings={"policy": "streaming_llm"}
        )
    live = computed = 0
    for kept in passes_of(trace, answer.request_id):
        live += kept.num_computed - computed
        computed = kept.num_computed
        live = 128 + (live - 128) % 32
        expected = torch.cat([torch.arange(4), torch.arange(computed - live + 4, computed)])
        assert torch.equal(kept.positions.long(), expected.expand(2, 2, -1))
    assert computed > 500


def test_protected_prompt_stays_while_it_can(engines: Engines) -> None:
    engine = engines.having("query_mixture")
    prompt = random_prompts([90], seed=3)[0]
    with engine.traced() as trace:
        [answer] = engine.generate([prompt], 200, settings={"protect_prompt": True})
    passes = passes_of(trace, answer.request_id)
    assert len(passes) >= 2
    for kept in passes:
        assert torch.equal(kept.positions[..., :90].long(), torch.arange(90).expand(2, 2, -1))


def cached(model: Path, prompt: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [K, T, D] of each layer, after rotation, by transformers."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        layers = network(torch.tensor([prompt])).past_key_values.layers
    return [(layer.keys[0], layer.values[0]) for layer in layers]


def test_oracle_against_a_cache_of_lists(tmp_path: Path) -> None:
    """The masks of one forward pass are what a cache does that forgets: token by token, in plain lists."""
    model = make_tiny_model(tmp_path / "model", layers=3, heads=4, kv_heads=2, head_dim=32, hidden=64)
    prompt, output = random_prompts((30, 20), seed=5)
    generator = torch.Generator().manual_seed(6)
    first = torch.stack([torch.randperm(13, generator=generator)[:6].sort().values for _ in range(6)])
    passes = [Kept(13, first.view(3, 2, 6))]
    for length in (30, 37):
        before = passes[-1]
        new = torch.arange(before.num_computed, length).expand(3, 2, -1)
        alive = torch.cat([before.positions, new], dim=-1)
        order = torch.rand(alive.shape, generator=generator).argsort(-1)[..., :8].sort(-1).values
        passes.append(Kept(length, alive.gather(-1, order)))
    expected = by_lists(model, [*prompt, *output], passes)[len(prompt) - 1 : -1]
    expected = expected.gather(1, torch.tensor(output)[:, None])[:, 0]
    torch.testing.assert_close(
        logprobs_with_drops(model, prompt, output, passes), expected, rtol=1e-4, atol=1e-4
    )
    assert (full_logprobs(model, prompt, output) - expected).abs().mean() > 0.1


@torch.inference_mode()
def by_lists(model: Path, tokens: list[int], passes: list[Kept]) -> torch.Tensor:
    """[T, V] log-probabilities with a list of (position, key, value) for each layer and KV head."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    caches = [[[] for _ in range(2)] for _ in network.model.layers]
    rows = []
    for position, token in enumerate(tokens):
        for kept in passes:
            if kept.num_computed == position:
                for layer, cache in enumerate(caches):
                    for head in range(2):
                        alive = set(kept.positions[layer, head].tolist())
                        cache[head] = [entry for entry in cache[head] if entry[0] in alive]
                        assert len(cache[head]) == len(alive)
        x = network.model.embed_tokens(torch.tensor([token]))
        cos, sin = network.model.rotary_emb(x[None], torch.tensor([[position]]))
        for layer, cache in zip(network.model.layers, caches, strict=True):
            x = x + attend(layer.self_attn, layer.input_layernorm(x), cache, position, cos[0], sin[0])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows.append(network.lm_head(network.model.norm(x))[0].log_softmax(-1))
    return torch.stack(rows)


def attend(module: Any, x: torch.Tensor, cache: Any, position: int, cos: Any, sin: Any) -> torch.Tensor:
    """One token's attention over the lists, its own key and value among them."""

    def rotated(vector: torch.Tensor) -> torch.Tensor:
        half = vector.shape[-1] // 2
        return vector * cos + torch.cat([-vector[..., half:], vector[..., :half]], dim=-1) * sin

    queries = rotated(module.q_norm(module.q_proj(x).view(4, -1)))
    keys = rotated(module.k_norm(module.k_proj(x).view(2, -1)))
    values = module.v_proj(x).view(2, -1)
    outputs = []
    for head, query in enumerate(queries):
        entries = cache[head // 2]
        if head % 2 == 0:
            entries.append((position, keys[head // 2], values[head // 2]))
        logits = torch.stack([query @ key for _, key, _ in entries]) * module.scaling
        outputs.append(logits.softmax(-1) @ torch.stack([value for _, _, value in entries]))
    return module.o_proj(torch.cat(outputs)[None])
