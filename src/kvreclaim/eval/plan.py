"""The plan of an evaluation: grid and sizes, validated without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreclaim.checks import check_int, require
from kvreclaim.chunks import WHOLE, chunk_reuse_of
from kvreclaim.compression_settings import AUTO, FULL, CompressionSettings, parse_budget
from kvreclaim.config import DENSE, EngineConfig, format_names
from kvreclaim.options import MAX_COUNT, check_options, option, settings_of

if TYPE_CHECKING:
    from kvreclaim.compression.config import CompressionConfig
    from kvreclaim.compression.stats import QueryStats
    from kvreclaim.engine.api.llm import LLM

DIALECTS = ("auto", "demo", "text")
KNOWN, UNKNOWN = "known", "unknown"
SERVER = "server"
"""The policy of a grid on a server: whatever its cache does."""
RULER = "ruler"
UNSHARED = ("policy", "budget", "max_loss", "content", "stats", "verify", "verify_tokens", "protect_system")
"""Fields of CompressionSettings that differ between cells, or do not apply to a given prompt."""
SHARED = tuple(name for name in settings_of(CompressionSettings) if name not in UNSHARED)


def is_full(policy: str) -> bool:
    """Whether a policy is the full cache. Raises: InvalidArgumentError for an unknown policy."""
    from kvreclaim.compression.registry import make_policy

    return policy not in (AUTO, SERVER) and make_policy(policy).name == FULL


def keeps(fraction: float | None, tokens: int | None, max_loss: float | None = None) -> str:
    """Format a budget: a share in per cent, tokens, or the maximum loss."""
    if max_loss is not None:
        return f"max loss {max_loss:g}"
    return f"{tokens} tokens" if fraction is None else f"{100 * fraction:.4g}%"


def policy_label(policy: str, *, is_auto: bool) -> str:
    """Format a policy, with "auto" before it if auto chose it."""
    return f"{AUTO}: {policy}" if is_auto else policy


@dataclass(frozen=True, slots=True)
class GridColumn:
    """One column of the grid: a policy at a budget, in one KV format, with one way of computing prompts.

    budget: a float is a share of the full cache's bytes, an int is tokens; replaced by max_loss if set
    """

    policy: str
    budget: float
    kv_cache_dtype: str
    sparse_prefill: str = DENSE
    chunk_reuse: str = WHOLE
    max_loss: float | None = None
    is_auto: bool = field(default=False, compare=False)
    """Whether auto chose the policy."""

    @property
    def label(self) -> str:
        form = "" if self.kv_cache_dtype == AUTO else f" {self.kv_cache_dtype}"
        prefill = "" if self.sparse_prefill == DENSE else f" {self.sparse_prefill}"
        reuse = "" if self.chunk_reuse == WHOLE else f" {self.chunk_reuse}"
        policy = policy_label(self.policy, is_auto=self.is_auto)
        return f"{policy}{form} {keeps(self.fraction, self.tokens, self.max_loss)}{prefill}{reuse}"

    @property
    def fraction(self) -> float | None:
        """The budget as a share; None if it is in tokens, or chosen by max_loss."""
        return None if isinstance(self.budget, int) or self.max_loss is not None else self.budget

    @property
    def tokens(self) -> int | None:
        """The budget in tokens; None if it is a share."""
        return self.budget if isinstance(self.budget, int) else None

    @property
    def is_full(self) -> bool:
        """Whether nothing is evicted: the full cache."""
        return is_full(self.policy)

    @property
    def evicts(self) -> bool:
        """Whether the policy evicts tokens, as far as its engine counts them."""
        from kvreclaim.compression.registry import make_policy

        return self.policy != SERVER and make_policy(self.policy).eviction_method.evicts


@dataclass(frozen=True, kw_only=True)
class EvalPlan:
    """The grid policy x budget x KV format x task x seed, and the settings that all cells share.

    policies:       specs as in CompressionConfig.policy; "full" is run once, for all budgets; "auto" is
                    reported with the policy that it chooses
    budgets:        either all shares of the full cache's bytes at each sequence's final length, in (0, 1], or
                    all tokens per KV head, whole numbers from 2; with protect_prompt, tokens are those kept
                    besides the prompt
    kv_cache_dtypes: as in EngineConfig; "auto" is the model's own dtype, under policy "auto" and budgets in
                    shares the one that would be served. The full cache in the first one is the baseline
    sparse_prefill: as in EngineConfig; the first one is the baseline's
    chunk_reuse:    ways of reusing the chunks of prompts; the first one is the baseline's
    num_examples:   per cell and seed
    interval, sinks, recent, protect_prompt, mode, stats: as in CompressionConfig
    max_loss, content: likewise, instead of budgets and of all settings before them
    free_running:   also generate if a task scores a gold trace
    batch_size:     examples at once; fewer if the pool holds fewer
    """

    policies: Sequence[str] = option(
        ("full", "streaming_llm", "knorm", "triattention", "query_mixture"),
        "Policies, comma-separated, with wrappers and options, such as protect(knorm),h2o.",
    )
    budgets: Sequence[float] = option(
        (0.5, 0.25, 0.1),
        "Budgets, comma-separated: shares of the full cache's bytes in the model's dtype (0.5,0.25), or "
        "tokens per KV head (512,256).",
    )
    kv_cache_dtypes: Sequence[str] = option(
        (AUTO,),
        "KV cache formats, comma-separated; all are compared with the full cache in the first. Default: the "
        "model's dtype, and for policy auto what would be served.",
        flags=("--kv-cache-dtype",),
    )
    sparse_prefill: Sequence[str] = option(
        (DENSE,), "Sparse-prefill methods, comma-separated, such as dense,pooled,pooled(alpha=0.3)."
    )
    chunk_reuse: Sequence[str] = option(
        (WHOLE,),
        "Chunk reuse in tasks with chunks, comma-separated, such as whole,question(share=0.15),random.",
    )
    seeds: Sequence[int] = option((0,), "Seeds, comma-separated; each draws other examples.")
    num_examples: int = option(16, "Examples per cell and seed.", low=1)
    free_running: bool = option(False, "Also generate the gold traces, for exact match and decode speed.")
    batch_size: int = option(16, "Examples per batch.", low=1)
    interval: int = 128
    sinks: int = 4
    recent: int = 64
    protect_prompt: bool = False
    mode: str | None = None
    stats: Any = None
    max_loss: float | None = None
    content: str | None = None
    _auto: str | None = field(default=None, init=False, compare=False)
    """The policy chosen by auto, once a model is known."""
    _formats: Mapping[float, str] = field(default_factory=dict, init=False, compare=False)
    """KV cache dtype in which auto would be served, by budget; empty if formats are named."""

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("policies", "budgets", "kv_cache_dtypes", "sparse_prefill", "chunk_reuse", "seeds"):
            values = getattr(self, name)
            require(
                isinstance(values, (list, tuple)) and bool(values),
                f"{name} is {values!r}; it must be a non-empty list.",
            )
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        object.__setattr__(self, "kv_cache_dtypes", format_names(self.kv_cache_dtypes))
        budgets = (1.0 if each == 1 and each is not True else parse_budget(each) for each in self.budgets)
        object.__setattr__(self, "budgets", tuple(budgets))
        require(
            len(set(map(type, self.budgets))) == 1,
            f"budgets are {', '.join(map(str, self.budgets))}; give shares (up to 1) or tokens (from 2), not "
            "both in one run.",
        )
        for seed in self.seeds:
            check_int("a seed", seed, 0)
        if self.max_loss is not None:
            given = ("budgets", *SHARED)
            changed = [name for name in given if getattr(self, name) != getattr(EvalPlan, name)]
            require(
                not changed,
                f"{', '.join(changed)} given with max_loss, which chooses a budget and is measured with "
                "default settings; leave one out.",
                "max_loss",
            )
        for reuse in self.chunk_reuse:
            chunk_reuse_of(reuse)
        self._check_compression()

    def _check_compression(self) -> None:
        """Run the checks that import torch."""
        from kvreclaim.compression.config import CompressionConfig
        from kvreclaim.compression.prefill.registry import make_method

        for policy in self.policies:
            is_full(policy)
        for method in self.sparse_prefill:
            make_method(method)
        for budget in self.budgets:  # shares are checked per sequence; everything else is, here
            CompressionConfig(FULL, budget if isinstance(budget, int) else 10**9, **self.shared)

    def resolved(self, llm: LLM) -> EvalPlan:
        """Replace "auto" by the policy that the model's statistics name, and by the KV cache dtype that would
        serve each share. Raises: InvalidArgumentError if they name no policy."""
        from kvreclaim.compression.config import CompressionConfig
        from kvreclaim.engine.api.kept_statistics import in_best_format, stats_source

        require(
            SERVER not in self.policies,
            f"policy {SERVER!r} stands for a server's cache; pass --url, or name a policy.",
        )
        if AUTO not in self.policies:
            return self
        best = llm.resolved(CompressionConfig(stats=self.stats)).policy
        plan = replace(self, policies=[best if policy == AUTO else policy for policy in self.policies])
        object.__setattr__(plan, "_auto", best)
        if self.kv_cache_dtypes == (AUTO,) and self.max_loss is None:
            config = CompressionConfig(budget=MAX_COUNT, stats=self.stats)
            stats, facts = stats_source(config, llm.stats_file), llm.loaded.facts
            served = {
                share: in_best_format(EngineConfig(), replace(config, budget_share=share), stats, facts)
                for share in self.budgets
                if not isinstance(share, int)
            }
            formats = {share: engine.kv_cache_dtype for share, engine in served.items()}
            object.__setattr__(plan, "_formats", formats)
        return plan

    @property
    def formats(self) -> tuple[str, ...]:
        """KV cache dtypes of all columns."""
        return tuple(
            dict.fromkeys((*self.kv_cache_dtypes, *(each.kv_cache_dtype for each in self.settings())))
        )

    def settings(self) -> list[GridColumn]:
        """All columns; the full cache once for each KV format."""
        return [
            GridColumn(
                policy,
                budget,
                self._formats.get(budget, dtype) if policy == self._auto else dtype,
                method,
                reuse,
                max_loss=None if is_full(policy) else self.max_loss,
                is_auto=policy == self._auto,
            )
            for dtype in self.kv_cache_dtypes
            for method in self.sparse_prefill
            for reuse in self.chunk_reuse
            for policy in self.policies
            for budget in ((1.0,) if is_full(policy) or self.max_loss is not None else self.budgets)
        ]

    @property
    def baseline(self) -> GridColumn:
        """The full cache that all others are compared with."""
        return GridColumn(FULL, 1.0, self.kv_cache_dtypes[0], self.sparse_prefill[0], self.chunk_reuse[0])

    def compression(
        self, setting: GridColumn, budget: int, stats: QueryStats | None
    ) -> CompressionConfig | None:
        """The configuration of one sequence; None for the full cache. Raises: InvalidArgumentError."""
        from kvreclaim.compression.config import CompressionConfig

        if setting.is_full:
            return None
        if setting.max_loss is not None:
            return CompressionConfig(
                setting.policy, max_loss=setting.max_loss, content=self.content, stats=stats
            )
        require(
            budget >= 1,
            f"{keeps(setting.fraction, setting.tokens)} of this sequence's cache: less than one block; raise "
            "the number of tokens or the budget, or lower the block size.",
        )
        return CompressionConfig(setting.policy, budget, stats=stats, **self.shared)

    @property
    def shared(self) -> dict[str, Any]:
        """Settings of every compression, by the names of CompressionConfig's fields; stats are extra."""
        return {name: getattr(self, name) for name in SHARED}


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Sizes and files of the named tasks.

    num_tokens:     of prompt and answer together
    text:           of perplexity, and of agreement instead of random tokens
    dialect:        "demo", "text", or "auto": demo if the tokenizer's words are the demo model's
    max_new_tokens: None uses each task's own
    temperature, samples: of gsm8k and reasoning-gym: sampled answers to each problem; their mean is reported
    question:       of RULER: in the cache when it is compressed ("known"), or added afterwards
    """

    num_tokens: int = option(2048, "Maximum length of a sequence in tokens.", low=16)
    dialect: str = option("auto", "Dialect of the tasks: auto, demo or text.", choices=DIALECTS)
    text: Path | None = option(None, "UTF-8 text file for perplexity and agreement.")
    max_new_tokens: int | None = option(None, "Maximum number of tokens per generated answer.", low=1)
    temperature: float = option(
        0.0, "Temperature of gsm8k and reasoning-gym; 0 is greedy.", low=0.0, high=2.0
    )
    samples: int = option(1, "Answers per problem of gsm8k and reasoning-gym.", low=1)
    question: str = option(
        UNKNOWN,
        "RULER's question: unknown or known when the document is compressed.",
        choices=(UNKNOWN, KNOWN),
    )

    def __post_init__(self) -> None:
        check_options(self)
        require(
            self.samples == 1 or self.temperature > 0,
            f"samples is {self.samples}, but at temperature 0 all answers are equal; raise temperature.",
        )
