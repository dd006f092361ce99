"""What a caller may set. Names follow vLLM; every value is checked once, here, and then frozen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from kvreclaim import speculation
from kvreclaim.checks import check_choice, check_int, check_number, parse_json, require
from kvreclaim.options import check_options, option

AUTO = "auto"
DENSE = "dense"
KERNELS = ("auto", "native", "triton", "reference")
KV_CACHE_DTYPES = ("auto", "fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4", "kivi4", "turboquant4")
KV_CACHE_DTYPE_ALIASES = MappingProxyType(
    {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8": "fp8_e4m3"}
)
"""What vLLM and PyTorch call some of them."""
SKIPPED_LAYERS = ("sliding_window",)
"""Kinds of layers whose keys and values kv_cache_dtype may leave alone."""
MAX_COUNT = (1 << 31) - 1
MAX_SEED = (1 << 64) - 1
MAX_BIAS = 100.0
TIERS = "KV cache beyond the pool"


def format_name(name: object) -> str:
    """One of KV_CACHE_DTYPES, an alias spelt out. Raises: InvalidArgumentError."""
    known = KV_CACHE_DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name
    check_choice("kv_cache_dtype", known, KV_CACHE_DTYPES)
    return str(known)


def format_names(names: Sequence[object]) -> tuple[str, ...]:
    """The same of several, each once. Raises: InvalidArgumentError."""
    require(bool(names), "kv_cache_dtype names no format; pass auto or, for example, bf16,int8,int4.")
    return tuple(dict.fromkeys(map(format_name, names)))


def _as_json(overrides: object) -> str | None:
    """hf_overrides, JSON or a dict, in one way of writing; None where they replace nothing."""
    try:
        said = parse_json(overrides) if isinstance(overrides, str) else overrides
        text = json.dumps(said, sort_keys=True)
    except (ValueError, TypeError) as error:
        said, text = error, ""
    require(
        said is None or isinstance(said, dict),
        f"hf_overrides is {overrides!r}; pass fields of config.json as a dict, or as JSON of one, such as "
        "'{\"max_position_embeddings\": 32768}'.",
        "hf_overrides",
    )
    return text if said else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's limits. Raises: InvalidArgumentError.

    hf_overrides, a dict or JSON, becomes JSON; of a field that holds others those that are not named stay.
    speculative_config, a SpeculativeConfig, a dict or JSON, becomes JSON, with all its fields.

    num_blocks and max_model_len are chosen from the model and the free memory where they are None.
    max_num_batched_tokens is the largest prefill chunk, too. An alias in kv_cache_dtype becomes the name that
    it stands for; kernels that cannot run where "auto" would take them are left out, which is said.
    """

    block_size: int = option(16, "Tokens of a block.", low=1)
    num_blocks: int | None = option(
        None,
        "Of the pool; as many as all sequences could fill, within the memory's fraction, where not said.",
        low=1,
        flags=("--num-blocks", "--num-gpu-blocks-override"),
    )
    max_num_seqs: int = option(64, "Sequences that run at once.", low=1)
    max_num_batched_tokens: int = option(2048, "Tokens computed in one step.", low=1)
    max_model_len: int | None = option(
        None,
        "Tokens of the longest sequence, prompt and output; where not said, the model's own limit, or what "
        "the pool holds.",
        low=1,
    )
    disable_hybrid_kv_cache_manager: bool | None = option(
        None,
        "All layers share one block table, also where layers with sliding windows could hold their windows "
        "alone, in tables of their own; where not said, they do unless something else asked for excludes it.",
    )
    enable_prefix_caching: bool = option(True, "Share the blocks of equal prefixes.")
    kv_memory_fraction: float = option(
        0.5,
        "Of the free memory, for blocks at most.",
        low=0.01,
        high=0.95,
    )
    max_signal_bytes: int | None = option(
        None,
        "Beside the blocks, for what policies ask to be kept of running sequences: queries, attention, "
        "digests; a fifth of the free memory, and no more than the blocks leave, where not said.",
        low=0,
    )
    seed: int = option(0, "Of requests that bring none.", low=0)
    scheduling_policy: str = option(
        "fcfs",
        "Who runs first: fcfs; priority (the lowest number); or cache (priority, and of equal ones who has "
        "most of its prompt in the cache, as long as nobody waits much longer for that).",
        choices=("fcfs", "priority", "cache"),
    )
    eviction_policy: str = option(
        "lru", "Which cached block is used again first: lru, slru, lfu, priority or gdsf."
    )
    spread_compression: bool = option(
        True, "Requests that arrive together are compressed at different steps, each by its prompt's hash."
    )
    prefix_snapshot_fraction: float = option(
        0.25,
        "Of all blocks, and of the disk's size, there half at most, so much for what compression left of "
        "prompts' beginnings (compress_at), kept for requests that begin so, too.",
        low=0.0,
        high=1.0,
    )
    max_pinned_fraction: float = option(0.5, "Of all blocks, at most so many pinned.", low=0.0, high=1.0)
    kv_cache_metrics_sample: float = option(
        0.01, "Share of the blocks whose time in the pool is measured.", low=0.0, high=1.0
    )
    kernels: str = option(
        "auto", "auto (native on a CPU, triton on CUDA), native, triton or reference.", choices=KERNELS
    )
    quantized_activations: str = option(
        "auto",
        "What products with packed weights take: auto (int16 on a CPU, the model's dtype on a GPU), int16 "
        "(15 bits, a scale per 32 numbers), int8 or exact (fp32).",
        choices=("auto", "int16", "int8", "exact"),
    )
    hf_overrides: str | None = option(
        None,
        "JSON of fields that replace those of the model's config.json, such as rope_parameters and "
        "max_position_embeddings for contexts longer than it says.",
    )
    kv_cache_dtype: str = option(
        "auto", "auto (the model's own), fp32, bf16, fp16, fp8_e4m3 (fp8), int8, int4, kivi4 or turboquant4."
    )
    kv_cache_dtype_skip_layers: tuple[str, ...] = option(
        (),
        "sliding_window: layers with windows keep the model's dtype; kv_cache_dtype is that of the others.",
        typed_as=list[str],
    )
    kv_offloading_size: float = option(
        0.0,
        "GiB of host memory for blocks that the pool gives back: prefixes are found there again, preempted "
        "sequences kept; 0 for none.",
        low=0.0,
        high=float(1 << 20),
        flags=("--kv-offloading-size", "--hicache-size"),
        panel=TIERS,
    )
    full_cache_host_size: float = option(
        0.0,
        "GiB of host memory in which the KV cache lies, streamed to the device layer by layer in each step; "
        "0: it lies in the pool. num_blocks is then that of compressed caches on the device.",
        low=0.0,
        high=float(1 << 20),
        panel=TIERS,
    )
    preemption_mode: str = option(
        "auto",
        "A sequence that gives way is moved to the host and back (swap, or offload) or computed again "
        "(recompute); auto: whichever takes less time here.",
        choices=("auto", "swap", "offload", "recompute"),
        panel=TIERS,
    )
    swap_space: float | None = option(
        None,
        "GiB of kv_offloading_size that sequences that gave way may take; half of it where not said.",
        low=0.0,
        high=float(1 << 20),
        panel=TIERS,
    )
    preemption_victim: str = option(
        "auto",
        "Who gives way when blocks are lacking: last (come), (lowest) priority, lru (computed longest ago) "
        "or (least) cost to bring back; auto: last, or priority under that scheduling policy.",
        choices=("auto", "last", "priority", "lru", "cost"),
        panel=TIERS,
    )
    kv_offloading_write_policy: str = option(
        "write_through",
        "Full blocks go to the host at once (write_through), or when they are met the second time "
        "(write_through_selective).",
        choices=("write_through", "write_through_selective"),
        panel=TIERS,
    )
    kv_offload_decode: bool = option(
        True, "Blocks with generated tokens go to the host, too, not prompts' alone.", panel=TIERS
    )
    kv_offloading_disk_path: str | None = option(
        None,
        "Directory of a file below the host's memory, in which prefixes outlive the process; token ids stand "
        "in it.",
        panel=TIERS,
    )
    kv_offloading_disk_size: float = option(
        4.0, "GiB that the file may take, made at once.", low=1e-6, high=float(1 << 20), panel=TIERS
    )
    kv_load_policy: str = option(
        "timeout",
        "What a request does while its prefix is read from disk: it waits for some time (timeout), until all "
        "is there (wait_complete), not at all (best_effort), or computes meanwhile (race). wait_complete "
        "loads always, the others where that is faster than computing.",
        choices=("timeout", "wait_complete", "best_effort", "race"),
        panel=TIERS,
    )
    kv_load_timeout: float = option(
        1.0,
        "Seconds that kv_load_policy timeout waits, and a quarter of a second more per 1,000 tokens.",
        low=0.0,
        high=3600.0,
        panel=TIERS,
    )
    kv_offloading_disk_write_policy: str = option(
        "write_through",
        "Blocks go from the host to disk at once (write_through), or when they are met the second time "
        "(write_through_selective), which spares the disk.",
        choices=("write_through", "write_through_selective"),
        panel=TIERS,
    )
    kv_offloading_eviction_policy: str = option(
        "slru", "Which block on the host makes way first: lru, slru, lfu, priority or gdsf.", panel=TIERS
    )
    kv_recall_size: float = option(
        0.0,
        "GiB of host memory for the evicted tokens of requests with recall; beyond it the pages that promise "
        "least go for good. 0: no recall.",
        low=0.0,
        high=float(1 << 20),
        panel=TIERS,
    )
    speculative_config: str | None = option(
        None,
        "JSON of how tokens are guessed that the model then checks, several at once, such as "
        '\'{"method": "ngram", "num_speculative_tokens": 8}\'; the output stays what it is.',
    )
    enforce_eager: bool = option(False, "On CUDA, no CUDA graphs.")
    sparse_prefill: str = option(
        DENSE,
        "How long prompts are computed: dense, or reading some of the blocks before them, which is lossy: "
        "pooled, a_shape, block_sparse or minference, with options as in pooled(alpha=0.1).",
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
            self.kv_offloading_size > 0 or self.preemption_mode != "swap",
            "preemption_mode is 'swap', but kv_offloading_size is 0: there is no host memory to move blocks "
            "to; give some GiB, or leave preemption_mode out.",
            "preemption_mode",
        )
        require(
            not (self.full_cache_host_size and self.kv_offloading_size),
            f"full_cache_host_size is {self.full_cache_host_size:g} and kv_offloading_size "
            f"{self.kv_offloading_size:g}, but there are no tiers below a cache that lies in host memory "
            "itself; leave one of them out.",
            "full_cache_host_size",
        )
        require(
            not (self.full_cache_host_size and self.kv_recall_size),
            f"full_cache_host_size is {self.full_cache_host_size:g}, kv_recall_size {self.kv_recall_size:g}, "
            "but a cache that lies in host memory loses nothing that could be recalled; leave one out.",
            "kv_recall_size",
        )
        require(
            self.kv_offloading_size > 0 or self.kv_offloading_disk_path is None,
            "kv_offloading_disk_path is set, but kv_offloading_size is 0: blocks go to disk from host "
            "memory; give some GiB of that, too.",
            "kv_offloading_disk_path",
        )
        require(
            self.enable_prefix_caching or self.kv_offloading_disk_path is None,
            "kv_offloading_disk_path is set, but enable_prefix_caching is off: the disk holds prefixes; "
            "switch it on, or leave the path out.",
            "kv_offloading_disk_path",
        )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """By the names of the fields. Raises: InvalidArgumentError for one that there is not."""
        known = [f.name for f in fields(cls)]
        unknown = [name for name in options if name not in known]
        require(
            not unknown,
            f"{', '.join(unknown)} is no option of the engine; the options are {', '.join(known)}.",
        )
        return cls(**options)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are drawn, in vLLM's names, meanings and order. Raises: InvalidArgumentError.

    n:           outputs for the prompt, computed once and forked with copy-on-write
    stop:        strings that end an output; the text ends before them
    stop_token_ids: tokens that end an output; they stay in token_ids
    logprobs:    log-probabilities of this many most likely tokens, and of the one drawn, per generated token;
                 -1: of the whole vocabulary. They are the model's, before anything here changes logits
    prompt_logprobs: the same per prompt token but the first; such a prompt is computed whole, without a
                 prefix hit, and the logits of a chunk, [max_num_batched_tokens, V], are held at once
    detokenize:  False: outputs have no text
    skip_special_tokens: special tokens add no text
    include_stop_str_in_output: the text ends with the stop string or token that ended the output
    logit_bias:  token id -> -100 .. 100, added to the logits before penalties
    allowed_token_ids: only these tokens are drawn
    bad_words:   texts that no output gets: a token that would complete one is not drawn. A word is looked for
                 as the tokenizer writes it at the start of a text and behind a space
    """

    n: int = option(1, low=1)
    presence_penalty: float = option(
        0.0, "Subtract this from the logits of tokens that the output contains.", low=-2.0, high=2.0
    )
    frequency_penalty: float = option(
        0.0,
        "Subtract this from a token's logit for each time that the output contains it.",
        low=-2.0,
        high=2.0,
    )
    repetition_penalty: float = option(
        1.0,
        "Penalize tokens that the prompt or the output contains; above 1 makes them less likely.",
        low=0.01,
        high=100.0,
    )
    temperature: float = option(
        1.0, "Randomness of sampling; 0 always takes the most likely token.", low=0.0, high=100.0
    )
    top_p: float = option(
        1.0,
        "Sample from the fewest most likely tokens whose probabilities add up to this.",
        low=0.0,
        high=1.0,
    )
    top_k: int = option(
        0, "Sample from this many most likely tokens; 0 or -1 means all.", low=-1, high=MAX_COUNT
    )
    min_p: float = option(
        0.0,
        "Drop tokens less probable than this share of the most likely token's probability.",
        low=0.0,
        high=1.0,
    )
    seed: int | None = option(
        None, "Seed of this request; the same seed gives the same output.", low=0, high=MAX_SEED
    )
    stop: str | list[str] | tuple[str, ...] | None = option(
        None,
        "Text that ends the output; the output ends before it. May be given several times.",
        typed_as=list[str],
    )
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = option(False, "Go on after the model's end-of-sequence token.")
    max_tokens: int | None = option(
        16, "Maximum number of tokens to generate; as many as fit where it is null.", low=1, high=MAX_COUNT
    )
    min_tokens: int = option(
        0, "Generate at least this many tokens before the output may end.", low=0, high=MAX_COUNT
    )
    logprobs: int | None = option(None, low=-1)
    prompt_logprobs: int | None = option(None, low=-1)
    detokenize: bool = option(True, kw_only=True)
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.", kw_only=True)
    include_stop_str_in_output: bool = option(
        False, "End the text with the stop string or token that ended the output.", kw_only=True
    )
    logit_bias: dict[int, float] | None = field(default=None, kw_only=True)
    allowed_token_ids: list[int] | tuple[int, ...] | None = field(default=None, kw_only=True)
    bad_words: list[str] | tuple[str, ...] | None = option(
        None,
        "Text that the output may not contain. May be given several times.",
        typed_as=list[str],
        kw_only=True,
    )
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self)
        require(self.top_p > 0, f"top_p is {self.top_p!r}; pass a number above 0, up to 1.", "top_p")
        require(
            not (self.temperature == 0 and self.n > 1),
            f"n is {self.n} with temperature 0; greedy outputs are all the same; pass n=1 or a temperature.",
            "n",
        )
        self._check_bias()
        self._check_ends()
        for name in ("stop_token_ids", "allowed_token_ids"):
            _check_token_ids(name, getattr(self, name))
        require(
            self.allowed_token_ids is None or bool(self.allowed_token_ids),
            "allowed_token_ids is empty, so that no token may come; pass some, or None.",
            "allowed_token_ids",
        )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for name, texts in (("stop", stop), ("bad_words", self.bad_words or [])):
            require(
                isinstance(texts, (list, tuple)) and all(isinstance(s, str) and s for s in texts),
                f"{name} is {getattr(self, name)!r}; pass non-empty strings in a list"
                f"{', or one string' if name == 'stop' else ''}.",
                name,
            )
        require(
            self.detokenize or not stop,
            f"stop is {self.stop!r} with detokenize False: stop strings are looked for in text; leave one of "
            "them out, or pass stop_token_ids.",
            "stop",
        )
        object.__setattr__(self, "stop_strings", tuple(stop))

    def _check_bias(self) -> None:
        bias = self.logit_bias
        require(
            bias is None or isinstance(bias, dict),
            f"logit_bias is a {type(bias).__name__}; pass a dict of token id to bias, or None.",
            "logit_bias",
        )
        for token, value in (bias or {}).items():
            check_int("a token id of logit_bias", token, 0, field="logit_bias")
            check_number(f"logit_bias of token {token}", value, -MAX_BIAS, MAX_BIAS, field="logit_bias")

    def _check_ends(self) -> None:
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it.",
            "min_tokens",
        )


def _check_token_ids(name: str, ids: object) -> None:
    require(
        ids is None or isinstance(ids, (list, tuple)),
        f"{name} is {ids!r}; pass a list of token ids or None.",
        name,
    )
    for token in ids or ():  # type: ignore[attr-defined]
        check_int(name, token, 0)


BUDGETS = tuple(32 * each for each in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512))
"""Steps of budget "auto"."""


@dataclass(frozen=True)
class CompressionSettings:
    """What compression.CompressionConfig is told, as far as it can be said without torch.

    Whole numbers are checked here, the rest where policies are known. Raises: InvalidArgumentError.
    """

    policy: str = option(
        AUTO,
        "Which tokens stay: a policy, or auto (also where only a budget or the like is said), the one that "
        "calibration found best for the model; the KV cache stays whole where nothing is said.",
        flags=("--kv-compression",),
    )
    budget: int = option(
        2048,
        "Tokens kept per layer and KV head; auto, with verify: as few as drafts get on with.",
        low=1,
        high=MAX_COUNT,
        unit=" tokens",
        flags=("--kv-budget",),
        typed_as=str,
        also=(AUTO,),
    )
    interval: int = option(
        128,
        "Tokens over the budget at which the next compression runs.",
        low=1,
        high=MAX_COUNT,
        unit=" token",
        flags=("--kv-compression-interval",),
    )
    sinks: int = option(
        4, "First tokens, never evicted.", low=0, high=MAX_COUNT, unit=" tokens", flags=("--kv-sinks",)
    )
    recent: int = option(
        128, "Last tokens, never evicted.", low=0, high=MAX_COUNT, unit=" tokens", flags=("--kv-recent",)
    )
    protect_prompt: bool = option(
        False, "Prompt tokens go only if there is no other way.", flags=("--kv-protect-prompt",)
    )
    mode: str | None = option(
        None,
        "Who shares a kept set: union, per_head or per_layer_head; the policy's own where not said.",
        flags=("--kv-compression-mode",),
    )
    verify: bool = option(
        False,
        "The compressed cache only drafts, and the full one, which is kept too, verifies: the output is that "
        "of the full cache.",
        flags=("--verify",),
        kw_only=True,
    )
    verify_tokens: int = option(
        16,
        "Drafted at most between two verifications.",
        low=1,
        high=64,
        unit=" token",
        flags=("--verify-tokens",),
        kw_only=True,
    )
    stats: object = option(
        None,
        "File of query statistics; the one beside the weights where not said.",
        flags=("--kv-compression-stats",),
        typed_as=str,
    )
    recall: str | None = option(
        None,
        "Evicted tokens wait in host memory (kv_recall_size) and come back when queries want them: at passes "
        "alone (pass), every N tokens too (tokens:N), or for every token (query); with options as in "
        "query(blocks=8).",
        flags=("--kv-recall", "--recall"),
        kw_only=True,
    )
    auto_budget: bool | None = field(default=None, kw_only=True)
    """That budget was "auto"; set by it."""

    def __post_init__(self) -> None:
        check_options(self)
        always = self.sinks + self.recent
        if self.budget == AUTO:
            object.__setattr__(self, "auto_budget", True)
            object.__setattr__(self, "budget", next((b for b in BUDGETS if b >= always + 16), MAX_COUNT))
        require(
            self.verify or not self.auto_budget,
            "budget is 'auto', but verify is False: no budget is known to be safe beforehand, and only with "
            "verify a budget that is too small costs nothing but time; set verify, or give tokens.",
            "budget",
        )
        require(
            self.budget > always,
            f"budget is {self.budget} tokens, but sinks + recent = {always} are always kept; raise the "
            "budget or lower sinks or recent.",
        )
