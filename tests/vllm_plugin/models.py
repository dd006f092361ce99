"""Random models whose attention matters: leave tokens out and the log-probabilities are others.

>>> directory = make_tiny_model(tmp_path / "tiny")  # config, bf16 weights, tokenizer with a chat template
>>> stats = make_stats(directory, tmp_path / "stats.safetensors")  # what `kvreclaim calibrate` would write
>>> prompts = random_prompts((600, 300), seed=1)
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

VOCAB_SIZE = 512
END_TOKEN = "<eos>"
MAX_POSITION = 16_384
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Gains that make attention matter while bf16 does not: logits of about GAIN^2 spread the attention over many
# keys without leaving it flat; attention adds three times what the residual stream holds, the MLP half of it.
QUERY_KEY_GAIN = 1.4
ATTENTION_GAIN = 3.0
MLP_GAIN = 0.5
HEAD_GAIN = 1.5
EMBEDDING_STD = 0.1
# Gains that make heads unequal by construction, whatever the CPU: keys of every other layer are 1 / KEY_GAIN
# as long, values of every other head VALUE_GAIN times, and queries and outputs take it back, to the last bit.
KEY_GAIN = 2.0
VALUE_GAIN = 16.0


def make_tiny_model(
    path: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    hidden: int = 128,
    seed: int = 0,
) -> Path:
    """Write a Qwen3-shaped random model in bf16, the same one for the same arguments.

    Args:
        path: directory to make; one that exists is taken as it is
        layers, heads, kv_heads, head_dim, hidden: its shape; vLLM's CPU build takes head_dim 32, 64, 80, …
        seed: of the weights

    Returns: path.
    """
    if path.exists():
        return path
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE - 1,
        pad_token_id=VOCAB_SIZE - 1,
    )
    network = Qwen3ForCausalLM(config)
    _fill(network, seed)
    end = config.eos_token_id
    network.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    return save(network.to(torch.bfloat16), path)


def save(network: PreTrainedModel, path: Path) -> Path:
    """Write a model and its tokenizer, whole or not at all. Returns: path."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    network.save_pretrained(partial)
    make_tokenizer().save_pretrained(partial)
    partial.rename(path)
    return path


def make_stats(model: Path, path: Path, *, num_centers: int = 8, num_tokens: int = 2048) -> Path:
    """Measure the model's queries on random tokens, as `kvreclaim calibrate` does on a text.

    Args:
        model:       directory of make_tiny_model
        path:        .safetensors file to write, outside of that directory: vLLM reads every such file in it
        num_centers: centres per query head
        num_tokens:  read, in windows of 1,024

    Returns: path. Holds moments, centres and covariance: enough for every policy that needs statistics.
    """
    from kvreclaim.calibrate.calibration import calibrate
    from kvreclaim.model.loader import load_model

    documents = random_prompts([1024] * (num_tokens // 1024), seed=77)
    loaded = load_model(model, dtype="float32", device="cpu")
    calibrate(loaded, documents, num_centers=num_centers, covariance=True).save(path)
    return path


def random_prompts(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    """One prompt of random token ids, none of them the end token, for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in lengths]


def _fill(network: Qwen3ForCausalLM, seed: int) -> None:
    """Weights of every matrix by its own generator, so that each depends on its place and the seed alone."""
    gains = {"o_proj": ATTENTION_GAIN, "down_proj": MLP_GAIN, "lm_head": HEAD_GAIN}
    with torch.no_grad():
        for index, (name, weight) in enumerate(network.named_parameters()):
            generator = torch.Generator().manual_seed(1000 * seed + index)
            if weight.ndim == 2:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                std = EMBEDDING_STD if "embed" in name else gain * weight.shape[1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(QUERY_KEY_GAIN)
        for index, layer in enumerate(network.model.layers):
            _tell_heads_apart(layer.self_attn, index % 2, network.config.num_key_value_heads)


def _tell_heads_apart(attention: Qwen3Attention, odd: int, kv_heads: int) -> None:
    """Scale heads by powers of two that cancel, so that the model's logits are the same."""
    if odd:
        attention.q_norm.weight *= KEY_GAIN
        attention.k_norm.weight /= KEY_GAIN
    values, outputs = attention.v_proj.weight, attention.o_proj.weight
    values.view(kv_heads, -1)[odd::2] *= VALUE_GAIN
    outputs.view(len(outputs), kv_heads, -1)[:, odd::2] /= VALUE_GAIN


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level one: the first 256 ids are bytes, the others words that text never encodes to."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"Ġw{index}": index for index in range(len(vocab), VOCAB_SIZE - 1)}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_TOKEN, special=True)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_TOKEN, pad_token=END_TOKEN, model_max_length=MAX_POSITION
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
