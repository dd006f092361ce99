"""Settings of the engine, in vLLM's names; each is checked once, then frozen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from kvreclaim import speculation
from kvreclaim.checks import check_choice, parse_json, require
from kvreclaim.options import (
    CACHING,
    COMPRESSION,
    FIRST,
    LIMITS,
    MEMORY,
    MODEL,
    OFFLOAD,
    SPECULATION,
    check_options,
    option,
)
from kvreclaim.refusals import Feature, refuse

DENSE = "dense"
KERNELS = ("auto", "native", "triton", "reference")
KV_CACHE_DTYPES = ("auto", "fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4", "turboquant4", "int8+int4")
"""A name with a plus sign: the format of keys, then that of values."""
KV_CACHE_DTYPE_ALIASES = MappingProxyType(
    {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8": "fp8_e4m3"}
)
"""Names of vLLM and PyTorch for some of them."""
SKIPPED_LAYERS = ("sliding_window",)
"""Kinds of layers that may keep the model's dtype under another kv_cache_dtype."""


def format_name(name: object) -> str:
    """Return the name in KV_CACHE_DTYPES of a format or its alias. Raises: InvalidArgumentError."""
    known = KV_CACHE_DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name
    check_choice("kv_cache_dtype", known, KV_CACHE_DTYPES)
    return str(known)


def format_names(names: Sequence[object]) -> tuple[str, ...]:
    """Return the names of several formats, each once. Raises: InvalidArgumentError."""
    require(bool(names), "kv_cache_dtype names no format; pass auto or, for example, bf16,int8,int4.")
    return tuple(dict.fromkeys(map(format_name, names)))


def _as_json(overrides: object) -> str | None:
    """Canonical JSON of hf_overrides, given as JSON or a dict; None if they replace nothing."""
    try:
        values = parse_json(overrides) if isinstance(overrides, str) else overrides
        text = json.dumps(values, sort_keys=True)
    except (ValueError, TypeError) as error:
        values, text = error, ""
    require(
        values is None or isinstance(values, dict),
        f"hf_overrides is {overrides!r}; pass fields of config.json as a dict, or as JSON of one, such as "
        "'{\"max_position_embeddings\": 32768}'.",
        "hf_overrides",
    )
    return text if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings, named and described as the options of `kvreclaim serve`. Raises:
    InvalidArgumentError.

    num_blocks, max_model_len: None: chosen from the model and the free memory
    max_num_batched_tokens: also the largest prefill chunk
    kv_cache_dtype:     an alias becomes the name that it stands for
    kernels:            "auto" takes the reference if native or Triton kernels cannot run, and logs why
    hf_overrides:       a dict or JSON; becomes JSON. Fields of a nested object that are not named stay
    speculative_config: a SpeculativeConfig, a dict or JSON; becomes JSON with all fields
    """

    block_size: int = option(16, "Tokens per block.", low=1, panel=MEMORY)
    num_blocks: int | None = option(
        None,
        "Number of blocks in the pool. Default: enough for every sequence, within --kv-memory-fraction.",
        low=1,
        flags=("--num-blocks", "--num-gpu-blocks-override"),
        panel=MEMORY,
    )
    max_num_seqs: int = option(64, "Most sequences in one step.", low=1, panel=FIRST)
    max_num_batched_tokens: int = option(2048, "Maximum number of tokens in one step.", low=1, panel=LIMITS)
    max_model_len: int | None = option(
        None,
        "Longest sequence, prompt and output. Default: the model's limit, or what the pool holds.",
        low=1,
        flags=("--max-model-len", "-c"),
        panel=FIRST,
    )
    disable_hybrid_kv_cache_manager: bool | None = option(
        None,
        "Give all layers one block table, sliding-window layers too. Default: only if another option needs "
        "it.",
        panel=MEMORY,
    )
    enable_prefix_caching: bool = option(True, "Share the blocks of equal prefixes.", panel=CACHING)
    state_checkpoints: int | None = option(
        None,
        "Models with recurrent layers: states kept for prefix hits. Default: as many as --max-num-seqs.",
        low=0,
        panel=CACHING,
    )
    state_checkpoint_interval: int = option(
        0,
        "Models with recurrent layers: keep a state every so many tokens of a prompt, a multiple of "
        "--block-size, too. 0: only where prompts end or part, and where answers end.",
        low=0,
        panel=CACHING,
    )
    state_drafts: int = option(
        0,
        "Models with recurrent layers: states kept for drafts of verify mode, so many for each of "
        "--max-num-seqs. Drafts use those of sequences that do not run, too.",
        low=0,
        high=64,
        panel=CACHING,
    )
    kv_memory_fraction: float | None = option(
        None,
        "Largest share of free memory for the KV pool. Default: 0.9 on a GPU, 0.5 on a CPU.",
        low=0.01,
        high=0.95,
        panel=FIRST,
    )
    memory_limit: float | None = option(
        None,
        "GiB that the model and its pool may take; with --models, all models together. Default: the free "
        "memory.",
        low=0.01,
        high=float(1 << 20),
        panel=MEMORY,
    )
    max_signal_bytes: int | None = option(
        None,
        "Memory for the queries, attention and digests that policies keep of running sequences. Default: a "
        "fifth of the free memory, and no more than the pool leaves.",
        low=0,
        panel=COMPRESSION,
    )
    seed: int = option(0, "Seed for requests without one.", low=0, panel=MODEL)
    scheduling_policy: str = option(
        "fcfs",
        "Queue order: fcfs, priority (lowest number first), or cache (priority, then the longest cached "
        "prefix, within a bound on waiting).",
        choices=("fcfs", "priority", "cache"),
        panel=LIMITS,
    )
    eviction_policy: str = option(
        "lru", "Eviction order of cached blocks: lru, slru or priority.", panel=CACHING
    )
    spread_compression: bool = option(
        True,
        "Compress requests that arrive together at different steps, spread by the hash of their prompts.",
        panel=COMPRESSION,
    )
    prefix_snapshot_fraction: float = option(
        0.25,
        "Largest share of the pool (and of the disk, there half at most) for cached compressed prefixes.",
        low=0.0,
        high=1.0,
        panel=CACHING,
    )
    conversation_snapshots: bool = option(
        False,
        "Let the next turn of a compressed conversation start from what the last one kept.",
        panel=CACHING,
    )
    max_pinned_fraction: float = option(
        0.5, "Largest share of the pool for pinned blocks.", low=0.0, high=1.0, panel=CACHING
    )
    kernels: str = option(
        "auto",
        "Kernels: auto (native on CPU, triton on CUDA), native, triton or reference.",
        choices=KERNELS,
        panel=MODEL,
    )
    threads: int | None = option(
        None,
        "CPU threads; 0 chooses for this CPU. It takes OMP_NUM_THREADS, else the number of cores, or of "
        "hardware threads where a trial at the start finds that faster. Without the option: torch's number.",
        low=0,
        high=1024,
        flags=("--threads", "-t"),
        panel=FIRST,
    )
    quantized_activations: str = option(
        "auto",
        "Activation format for packed weights: auto (int16 on CPU, the model's dtype on GPU), int16 (15 "
        "bits, one scale per 32 values), int8 or exact (fp32).",
        choices=("auto", "int16", "int8", "exact"),
        panel=MODEL,
    )
    cache_packed_weights: bool = option(
        True,
        "Keep a copy of a GGUF file's packed weights in the cache directory: later starts are faster.",
        panel=MODEL,
    )
    hf_overrides: str | None = option(
        None,
        "JSON that overrides fields of the model's config.json, such as rope_parameters and "
        "max_position_embeddings for longer contexts.",
        panel=MODEL,
    )
    kv_cache_dtype: str = option(
        "auto",
        "KV cache format: auto (the model's dtype), fp32, bf16, fp16, fp8_e4m3 (fp8), int8, int4, "
        "turboquant4 or int8+int4 (keys + values).",
        panel=FIRST,
    )
    kv_cache_dtype_skip_layers: tuple[str, ...] = option(
        (),
        "Layers that keep the model's dtype: sliding_window.",
        typed_as=list[str],
        panel=MEMORY,
    )
    kv_offloading_size: float = option(
        0.0,
        "GiB of host memory for evicted prefixes and swapped sequences.",
        low=0.0,
        high=float(1 << 20),
        flags=("--kv-offloading-size", "--hicache-size"),
        panel=FIRST,
    )
    full_cache_host_size: float = option(
        0.0,
        "GiB of host memory for the full KV cache, which is then streamed to the device layer by layer. "
        "--num-blocks then counts the blocks of compressed caches on the device. 0: the cache is in the "
        "pool.",
        low=0.0,
        high=float(1 << 20),
        panel=OFFLOAD,
    )
    preemption_mode: str = option(
        "auto",
        "What happens to a preempted sequence: swap (or offload) moves it to the host, recompute computes "
        "it again, auto takes the faster.",
        choices=("auto", "swap", "offload", "recompute"),
        panel=OFFLOAD,
    )
    swap_space: float | None = option(
        None,
        "GiB of --kv-offloading-size that preempted sequences may use. Default: half.",
        low=0.0,
        high=float(1 << 20),
        panel=OFFLOAD,
    )
    kv_offloading_state_fraction: float = option(
        0.25,
        "Models with recurrent layers: share of --kv-offloading-size and --kv-offloading-disk-size for the "
        "states at the ends of prefixes. 0: no prefixes on the host.",
        low=0.0,
        high=1.0,
        panel=OFFLOAD,
    )
    preemption_victim: str = option(
        "auto",
        "Which sequence to preempt: last (the newest), priority (the least important), lru (computed least "
        "recently), cost (cheapest to resume), auto (last, or priority under that queue order).",
        choices=("auto", "last", "priority", "lru", "cost"),
        panel=LIMITS,
    )
    kv_offloading_write_policy: str = option(
        "write_through",
        "When full blocks are copied to the host: at once (write_through), or on their second use "
        "(write_through_selective).",
        choices=("write_through", "write_through_selective"),
        panel=OFFLOAD,
    )
    kv_offload_decode: bool = option(
        True, "Copy blocks with generated tokens to the host too, not only prompts.", panel=OFFLOAD
    )
    kv_offloading_disk_path: str | None = option(
        None,
        "Directory for prefixes on disk, which survive the process. The files contain token ids.",
        panel=OFFLOAD,
    )
    kv_offloading_disk_size: float = option(
        4.0,
        "GiB for all files in that directory; the block file's share is allocated at the start.",
        low=1e-6,
        high=float(1 << 20),
        panel=OFFLOAD,
    )
    kv_load_policy: str = option(
        "timeout",
        "What a request does while its prefix is read from disk: wait up to --kv-load-timeout (timeout), "
        "wait until it is read (wait_complete), not wait (best_effort), or compute meanwhile (race). Only "
        "wait_complete also loads what would be faster to compute.",
        choices=("timeout", "wait_complete", "best_effort", "race"),
        panel=OFFLOAD,
    )
    kv_load_timeout: float = option(
        1.0,
        "Seconds to wait under --kv-load-policy timeout, plus 0.25 s per 1,000 tokens.",
        low=0.0,
        high=3600.0,
        panel=OFFLOAD,
    )
    kv_offloading_disk_write_policy: str = option(
        "write_through",
        "When blocks are written from the host to disk: at once (write_through), or on their second use "
        "(write_through_selective), which writes less.",
        choices=("write_through", "write_through_selective"),
        panel=OFFLOAD,
    )
    kv_offloading_eviction_policy: str = option(
        "slru", "Eviction order of blocks on the host: lru, slru or priority.", panel=OFFLOAD
    )
    speculative_config: str | None = option(
        None,
        "JSON that configures speculative decoding, such as "
        '\'{"method": "ngram", "num_speculative_tokens": 8}\'. The output does not change.',
        panel=SPECULATION,
    )
    batch_invariant: bool = option(
        False,
        "Native kernels: compute every row in the same order of sums, so that a request's tokens and "
        "log-probabilities are the same, to the bit, whatever else runs. Prompts take longer.",
        panel=MODEL,
    )
    enforce_eager: bool = option(False, "Use no CUDA graphs.", panel=MODEL)
    sparse_prefill: str = option(
        DENSE,
        "How long prompts are computed: dense, or with sparse attention, which is lossy: pooled, a_shape, "
        "block_sparse or minference, with options as in pooled(alpha=0.1).",
        panel=COMPRESSION,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative_config", speculation.as_json(self.speculative_config))
        check_options(self)
        object.__setattr__(self, "kv_cache_dtype", format_name(self.kv_cache_dtype))
        object.__setattr__(self, "hf_overrides", _as_json(self.hf_overrides))
        skipped = self.kv_cache_dtype_skip_layers
        skipped = (skipped,) if isinstance(skipped, str) else tuple(skipped)
        for each in skipped:
            check_choice("kv_cache_dtype_skip_layers", each, SKIPPED_LAYERS)
        object.__setattr__(self, "kv_cache_dtype_skip_layers", skipped)
        if self.preemption_mode == "offload":
            object.__setattr__(self, "preemption_mode", "swap")
        for name in ("eviction_policy", "kv_offloading_eviction_policy"):
            value = getattr(self, name)
            require(isinstance(value, str), f"{name} is {value!r}; pass a name, such as 'lru'.", name)
        require(
            self.state_checkpoint_interval % self.block_size == 0,
            f"state_checkpoint_interval is {self.state_checkpoint_interval}, but prefix hits end after "
            f"blocks of {self.block_size} tokens; pass a multiple.",
            "state_checkpoint_interval",
        )
        refuse(self.features())

    def features(self) -> dict[Feature, object]:
        """Return the features for the table of refusals; None and False: off."""
        return {
            Feature.HOST_CACHE: f"{self.full_cache_host_size:g}" if self.full_cache_host_size else None,
            Feature.OFFLOADING: f"{self.kv_offloading_size:g}" if self.kv_offloading_size else None,
            Feature.NO_OFFLOADING: not self.kv_offloading_size,
            Feature.SWAP: self.preemption_mode == "swap",
            Feature.DISK: self.kv_offloading_disk_path,
            Feature.NO_PREFIX_CACHE: not self.enable_prefix_caching,
            Feature.DRAFTS: self.speculative_config,
            Feature.BATCH_INVARIANT: self.batch_invariant,
            Feature.FIRST_COME: self.scheduling_policy == "fcfs",
        }

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Make a config from options by field name. Raises: InvalidArgumentError for an unknown one."""
        known = [f.name for f in fields(cls)]
        unknown = [name for name in options if name not in known]
        require(
            not unknown,
            f"{', '.join(unknown)} is no option of the engine; the options are {', '.join(known)}.",
        )
        return cls(**options)
