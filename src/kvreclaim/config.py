"""What a caller may set. Names follow vLLM; every value is checked once, here, and then frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from kvreclaim.checks import check_bool, check_choice, check_int, check_number, require

KERNELS = ("auto", "native", "triton", "reference")
SCHEDULING_POLICIES = ("fcfs", "priority")
KV_CACHE_DTYPES = ("auto", "fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4", "kivi4", "turboquant4")
KV_CACHE_DTYPE_ALIASES = MappingProxyType(
    {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8": "fp8_e4m3"}
)
"""What vLLM and PyTorch call some of them."""
MAX_BIAS = 100.0


def format_name(name: object) -> str:
    """One of KV_CACHE_DTYPES, an alias spelt out. Raises: InvalidArgumentError."""
    known = KV_CACHE_DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name
    check_choice("kv_cache_dtype", known, KV_CACHE_DTYPES)
    return str(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's limits.

    num_blocks:             blocks in the pool; None: as many as max_num_seqs sequences of max_model_len
                            could fill, at most kv_memory_fraction of the device's free memory
    max_model_len:          longest sequence (prompt and output) in tokens; None: the model's own limit
    max_num_batched_tokens: tokens computed in one step, and the largest prefill chunk
    seed:                   of requests that bring none
    scheduling_policy:      "fcfs", or "priority": the request with the lowest number first
    eviction_policy:        which cached block is reused first, a name of memory.eviction
    max_pinned_fraction:    of the pool's blocks may be worth keeping longer than others at once
    kv_cache_metrics_sample: share of the blocks whose time in the pool is measured
    kernels:                "auto" (native on a CPU, triton on CUDA, reference where these cannot run, which
                            is said), or one of them by name
    kv_cache_dtype:         how keys and values are stored: "auto" (the model's dtype), or one of
                            KV_CACHE_DTYPES; an alias becomes the name that it stands for
    enforce_eager:          on CUDA, run decode steps without CUDA graphs
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    kv_memory_fraction: float = 0.5
    seed: int = 0
    scheduling_policy: str = "fcfs"
    eviction_policy: str = "lru"
    max_pinned_fraction: float = 0.5
    kv_cache_metrics_sample: float = 0.01
    kernels: str = "auto"
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, 1)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("seed", self.seed, 0)
        for name in ("num_blocks", "max_model_len"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_number("kv_memory_fraction", self.kv_memory_fraction, 0.01, 0.95)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("enforce_eager", self.enforce_eager)
        check_choice("kernels", self.kernels, KERNELS)
        object.__setattr__(self, "kv_cache_dtype", format_name(self.kv_cache_dtype))
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        require(
            isinstance(self.eviction_policy, str),
            f"eviction_policy is {self.eviction_policy!r}; pass a name, such as 'lru'.",
            "eviction_policy",
        )
        check_number("max_pinned_fraction", self.max_pinned_fraction, 0.0, 1.0)
        check_number("kv_cache_metrics_sample", self.kv_cache_metrics_sample, 0.0, 1.0)

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
    """How one request's tokens are drawn; vLLM's names and meanings.

    temperature: 0 is greedy; top_k: 0 or -1 keeps all; top_p, min_p: nucleus and relative minimum
    n:           outputs for the prompt, computed once and forked with copy-on-write
    stop:        strings that end an output (cut from the text); stop_token_ids likewise (kept in token_ids)
    logprobs:    per generated token the log-probabilities of this many most likely tokens and of the
                 one drawn, before temperature, penalties and logit_bias; None keeps none
    prompt_logprobs: the same per prompt token but the first; such a prompt is computed whole, without a
                 prefix hit, and the logits of a chunk, [max_num_batched_tokens, V], are held at once
    logit_bias:  token id -> -100 .. 100, added to the logits before all else that changes them
    max_tokens:  None: as many as max_model_len leaves
    cache_salt:  prefix blocks are shared only among requests with the same salt
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    cache_salt: str | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_draw()
        self._check_ends()
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        require(
            isinstance(stop, (list, tuple)) and all(isinstance(s, str) and s for s in stop),
            f"stop is {self.stop!r}; pass a non-empty string or a list of them.",
            "stop",
        )
        object.__setattr__(self, "stop_strings", tuple(stop))

    def _check_draw(self) -> None:
        check_int("n", self.n, 1)
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("top_p", self.top_p, 0.0, 1.0)
        require(self.top_p > 0, f"top_p is {self.top_p!r}; pass a number above 0, up to 1.", "top_p")
        check_int("top_k", self.top_k, -1)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            check_int("seed", self.seed, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0)
        self._check_bias()
        greedy = self.temperature == 0
        require(
            not (greedy and self.n > 1),
            f"n is {self.n} with temperature 0; greedy outputs are all the same; pass n=1 or a temperature.",
            "n",
        )

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
        check_bool("ignore_eos", self.ignore_eos)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
            require(
                self.min_tokens <= self.max_tokens,
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it.",
                "min_tokens",
            )
        require(
            self.stop_token_ids is None or isinstance(self.stop_token_ids, (list, tuple)),
            f"stop_token_ids is {self.stop_token_ids!r}; pass a list of token ids or None.",
            "stop_token_ids",
        )
        for token in self.stop_token_ids or ():
            check_int("stop_token_ids", token, 0)
        require(
            self.cache_salt is None or isinstance(self.cache_salt, str),
            f"cache_salt is {self.cache_salt!r}; pass a string or None.",
            "cache_salt",
        )
