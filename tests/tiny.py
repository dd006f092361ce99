"""Tiny random models of every family that kvreclaim serves, or refuses, and transformers as their oracle.

>>> tiny.save_model("qwen3", directory)  # config.json, model.safetensors (and a tokenizer for llama)
>>> tiny.prompts((5, 33), seed=1)  # token ids, the same for every family
>>> tiny.greedy(directory, prompts, 24)  # what transformers' generate() answers, one prompt at a time
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MinistralConfig,
    MistralConfig,
    NemotronHConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    StableLmConfig,
    T5Config,
    T5ForConditionalGeneration,
    Zamba2Config,
)

DEVICE = os.environ.get("KVRECLAIM_TEST_DEVICE", "cpu")
"""The device of engines in tests that can run elsewhere: `make gpu` runs them on cuda."""
VOCAB_SIZE = 272
WINDOW = 8
CHUNK = 16
WEIGHT_GAIN = 8.0
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}

_DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}

_CLASSES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-moe": (Qwen3MoeConfig, {"head_dim": 16, "num_experts": 4, **_MOE}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 25,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 25,
        },
    ),
    "ministral": (
        MinistralConfig,
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "llama4": (
        Llama4TextConfig,
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "attention_chunk_size": CHUNK,
            "floor_scale": 20,
            "attn_scale": 0.4,
        },
    ),
    "phi3": (Phi3Config, {}),
    "gpt-oss": (
        GptOssConfig,
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "glm4": (Glm4Config, {"head_dim": 16}),
    "olmo2": (Olmo2Config, {}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "deepseek-v2": (
        DeepseekV2Config,
        {**_DEEPSEEK, **_MOE, "q_lora_rank": None, "kv_lora_rank": 32, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek-v3": (DeepseekV3Config, {**_DEEPSEEK, **_MOE}),
    "llama-llama3": (LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": _YARN}),
    "llama-linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "stablelm": (StableLmConfig, {}),
    "falcon": (FalconConfig, {}),
    "mamba": (MambaConfig, {}),
    "qwen3-next": (Qwen3NextConfig, {**_DELTA, "num_experts": 0, "mlp_only_layers": []}),
    "qwen3.5": (Qwen3_5TextConfig, _DELTA),
    "lfm2": (
        Lfm2Config,
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "granite4": (
        GraniteMoeHybridConfig,
        {
            **_MAMBA2,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
        },
    ),
    "falcon-h1": (FalconH1Config, {**_MAMBA2, "head_dim": 16, "mamba_d_ssm": 128}),
    "bamba": (BambaConfig, {**_MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "jamba": (
        JambaConfig,
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
        },
    ),
    "nemotron-h": (
        NemotronHConfig,
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M*M-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "zamba2": (
        Zamba2Config,
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "mamba_d_state": 16,
            "mamba_headdim": 16,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "adapter_rank": 8,
        },
    ),
    "t5": (T5Config, {"d_model": 64, "num_layers": 2}),
}

SCALED = ("llama-llama3", "llama-yarn", "llama-linear")
REFUSED = ("stablelm", "falcon", "mamba", "t5")
HYBRIDS = (
    "qwen3-next",
    "qwen3.5",
    "lfm2",
    "granite4",
    "falcon-h1",
    "bamba",
    "jamba",
    "nemotron-h",
    "zamba2",
)
FAMILIES = tuple(name for name in _CLASSES if name not in SCALED + REFUSED + HYBRIDS)
LATENT = ("deepseek-v2", "deepseek-v3")
WINDOWED = ("mistral", "ministral", "gemma2", "gemma3", "gpt-oss", "llama4")
GROUPED = ("ministral", "gemma2", "gemma3", "gpt-oss", "llama4")


def config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The family's configuration; an override replaces a field."""
    config_class, fields = _CLASSES[family]
    shape = {"vocab_size": VOCAB_SIZE} if family == "t5" else _SHAPE
    return config_class(**{**shape, **fields, **overrides})


def build(family: str, seed: int = 5, **overrides: Any) -> PreTrainedModel:
    """An fp32 model with weights so large that attention is peaked and greedy outputs vary; vectors
    (norms, biases, sinks) get noise, so that leaving one out shows."""
    torch.manual_seed(seed)
    settings = config(family, **overrides)
    if family == "t5":
        return T5ForConditionalGeneration(settings)
    model = AutoModelForCausalLM.from_config(settings).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # logarithms of decays
                continue
            if parameter.dim() > 1:
                parameter.mul_(WEIGHT_GAIN)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def save_model(family: str, directory: Path, *, seed: int = 5, **overrides: Any) -> Path:
    """Write the model to the directory, for llama with a tokenizer beside it. Returns the directory."""
    model = build(family, seed, **overrides)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = overrides.get("eos_token_id")
    model.save_pretrained(directory)
    if family == "llama":
        tokenizer(eos_token=None).save_pretrained(directory)  # without an eos_token_id nothing ends an output
    return Path(directory)


def tokenizer(eos_token: str | None = "<eos>") -> PreTrainedTokenizerFast:
    """Byte-level: ids 0 to 255 are bytes, then a few merged words, then <eos>; encodes any text."""
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("e", "n"), ("en", "d"), ("t", "h"), ("th", "e"), ("s", "t"), ("o", "p")]
    vocab = alphabet | {a + b: len(alphabet) + i for i, (a, b) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def prompts(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    """One prompt of random token ids, none of them 0, for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def load_oracle(directory: Path) -> PreTrainedModel:
    """transformers' own model, with its own eager attention, fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def greedy(directory: Path, token_prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The oracle's greedy continuation of each prompt, computed alone."""
    model = load_oracle(directory)
    answers = []
    for prompt in token_prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def remembered(directory_of: Callable[[str], Path], own_prompts: list[list[int]], max_tokens: int) -> Any:
    """family, prompts (default: own_prompts) -> what `greedy` gives for them, computed once."""
    known: dict[str, list[list[int]]] = {}

    def answers(family: str, prompts: list[list[int]] = own_prompts) -> list[list[int]]:
        key = f"{family} {prompts}"
        if key not in known:
            known[key] = greedy(directory_of(family), prompts, max_tokens)
        return known[key]

    return answers


@torch.inference_mode()
def queries_before_rope(directory: Path, documents: list[list[int]]) -> list[Tensor]:
    """Per layer [H, T, D], T = tokens of all documents: what the oracle's own modules put out before
    rotation, each document computed alone."""
    model = load_oracle(directory)
    seen: list[list[Tensor]] = [[] for _ in model.model.layers]
    for layer, block in enumerate(model.model.layers):
        last = next(m for n in _LAST_BEFORE_ROPE if (m := getattr(block.self_attn, n, None)) is not None)
        by_head = model.config.model_type == "gemma3_text"  # its norm comes behind the transposition

        def see(_, __, out, layer=layer, by_head=by_head, attention=block.self_attn) -> None:
            out = out[0].transpose(0, 1) if by_head else out[0]
            seen[layer].append(_llama4(out, attention) if hasattr(attention, "floor_scale") else out)

        last.register_forward_hook(see)
    for document in documents:
        model(torch.tensor([document]))
    return [_as_heads(torch.cat(parts), model, layer) for layer, parts in enumerate(seen)]


def _llama4(out: Tensor, attention: Any) -> Tensor:
    """Its norm has no weights, so that it may as well come before the rotation; where there is none, queries
    grow with their positions."""
    if attention.use_rope:
        return attention.qk_norm(out.unflatten(-1, (-1, attention.head_dim))).flatten(1)
    steps = torch.floor((torch.arange(len(out)) + 1.0) / attention.floor_scale)
    return out * (torch.log1p(steps) * attention.attn_scale + 1.0)[:, None]


_LAST_BEFORE_ROPE = ("q_norm", "q_b_proj", "qkv_proj", "q_proj")


def _as_heads(out: Tensor, model: PreTrainedModel, layer: int) -> Tensor:
    """A hooked output of T tokens as [H, T, D], in the arrangement that the rotation works on and with
    the factor that YaRN puts into it; of latent attention what meets a latent and its rotary key."""
    heads, kind = model.config.num_attention_heads, model.config.model_type
    factor = getattr(model.model.rotary_emb, "attention_scaling", 1.0)
    if kind == "phi3":
        out = out[:, : model.config.hidden_size]
    out = out.reshape(len(out), heads, -1).transpose(0, 1)
    if kind not in ("deepseek_v2", "deepseek_v3"):
        return out * factor
    dims = model.config.qk_nope_head_dim
    weight = model.model.layers[layer].self_attn.kv_b_proj.weight.view(heads, -1, model.config.kv_lora_rank)
    rotated = out[..., dims:]
    if kind == "deepseek_v3":
        rotated = torch.cat([rotated[..., 0::2], rotated[..., 1::2]], dim=-1)
    return torch.cat([out[..., :dims] @ weight[:, :dims], rotated * factor], dim=-1)
