"""Models with sliding windows: the full-attention layers are compressed, the windows stay vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import oracle
import pytest
import torch
from engines import Engine
from models import ATTENTION_GAIN, EMBEDDING_STD, HEAD_GAIN, MLP_GAIN, VOCAB_SIZE, _tokenizer, random_prompts
from oracle import Kept, passes_of
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from vllm.exceptions import VLLMValidationError

from kvreclaim.integrations.vllm.groups import most_window_blocks

WINDOW = 64
NUM_BLOCKS = 80
FP32 = 1e-3
"""Mean difference of log-probabilities that computing in fp32 may make."""
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "gemma"
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(KINDS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=KINDS,
        max_position_embeddings=16_384,
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE - 1,
        pad_token_id=VOCAB_SIZE - 1,
        tie_word_embeddings=False,
    )
    network = Gemma3ForCausalLM(config)
    gains = {"o_proj": ATTENTION_GAIN, "down_proj": MLP_GAIN, "lm_head": HEAD_GAIN}
    with torch.no_grad():
        for index, (name, weight) in enumerate(network.named_parameters()):
            generator = torch.Generator().manual_seed(index)
            if weight.ndim == 2:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                std = EMBEDDING_STD if "embed" in name else gain * weight.shape[1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(0.4)  # Gemma's norms multiply by 1 + weight
    network.to(torch.bfloat16).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(gemma: Path) -> Iterator[Engine]:
    settings = {"policy": "keydiff", "budget": 128, "interval": 64, "sinks": 4, "recent": 32}
    engine = Engine(
        gemma, compression=settings, num_blocks=NUM_BLOCKS, dtype="float32", enable_prefix_caching=False
    )
    yield engine
    engine.close()


@torch.inference_mode()
def dropped_logprobs(model: Path, prompt: list[int], output: list[int], passes: list[Kept]) -> torch.Tensor:
    """As oracle.logprobs_with_drops, of a model whose windows see what they always see."""
    network = oracle._load(model)
    ids = torch.tensor([[*prompt, *output]])
    count, at = ids.shape[1], 0
    age = torch.arange(count)[:, None] - torch.arange(count)
    for kind, layer in zip(KINDS, network.model.layers, strict=True):
        attention = layer.self_attn
        attention.kv_rounding = None
        if kind == "full_attention":
            attention.seen = oracle.attention_mask(passes, at, network.config.num_attention_heads, count)
            at += 1
        else:
            attention.seen = ((age >= 0) & (age < WINDOW))[None]
    logits = network(ids, use_cache=False).logits[0]
    of_output = logits[len(prompt) - 1 : -1].float().log_softmax(dim=-1)
    return of_output.gather(1, torch.tensor(output)[:, None])[:, 0]


def test_logprobs_are_those_of_the_tokens_kept_in_full_layers(engine: Engine, gemma: Path) -> None:
    """Beside them one request that is not compressed."""
    prompts, wanted = random_prompts((600, 450, 500), seed=1), (None, None, "off")
    with engine.traced() as trace:
        names = [
            engine.add(prompt, 160, settings=asked) for prompt, asked in zip(prompts, wanted, strict=True)
        ]
        engine.run()
    for name, prompt, asked in zip(names, prompts, wanted, strict=True):
        answer, passes = engine.answer(name), passes_of(trace, name)
        assert all(len(kept.positions) == KINDS.count("full_attention") for kept in passes)
        dropped = dropped_logprobs(gemma, prompt, answer.tokens, passes)
        effect = float((dropped - dropped_logprobs(gemma, prompt, answer.tokens, [])).abs().mean())
        error = float((dropped - answer.logprobs).abs().mean())
        assert len(passes) >= 3 if asked is None else not passes
        assert effect > 100 * FP32 or asked == "off"
        assert error <= FP32
    assert engine.is_empty()


def test_many_requests_hold_their_budgets_and_their_windows(engine: Engine) -> None:
    one = engine.add(random_prompts((1800,), seed=2)[0], 20)
    watch = engine.run()
    assert engine.answer(one).figures["tokens_evicted"] > 1500
    assert max(watch.used) <= engine.scheduler.reclaim.most_blocks(2048)
    names = [engine.add(prompt, 150) for prompt in random_prompts((900,) * 6, seed=3)]
    assert max(engine.run().running) >= 3
    assert all(engine.answer(name).figures["tokens_evicted"] > 700 for name in names)
    assert engine.is_empty()


def test_a_request_that_keeps_all_needs_room_for_its_windows_too(engine: Engine) -> None:
    """At the limit it is served; beyond it its prompt and windows would not fit, whoever waits for them."""
    room = (NUM_BLOCKS - 1 - most_window_blocks(engine.config)) * 32
    prompt = random_prompts((room,), seed=4)[0]
    with pytest.raises(VLLMValidationError, match=f"keeps all its tokens.*holds {room};"):
        engine.add(prompt, 1, settings="off")
    name = engine.add(prompt[:-4], 4, settings="off")
    watch = engine.run()
    assert len(engine.answer(name).tokens) == 4
    assert watch.preemptions == 0
    assert engine.is_empty()
