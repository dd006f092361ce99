"""Options of a plan, besides the model."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.checks import require
from kvreclaim.compression.spec.promise import PromiseOptions
from kvreclaim.config import format_name
from kvreclaim.options import check_options, option
from kvreclaim.plan.roofline import BANDWIDTH_SHARE, FLOPS_SHARE

SEQUENCES, CARD, TRACE = "Sequences", "Card", "Trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(PromiseOptions):
    """Raises: InvalidArgumentError."""

    context: int | None = option(None, "Length of one sequence in tokens.", low=1, panel=SEQUENCES)
    sequences: int | None = option(None, "Number of sequences at once.", low=1, panel=SEQUENCES)
    prefix: int = option(0, "Tokens of a prefix that all sequences share.", low=0, panel=SEQUENCES)
    own: int = option(
        0, "Tokens of each sequence after the shared prefix, prompt and output.", low=0, panel=SEQUENCES
    )
    max_model_len: int | None = option(
        None,
        "Tokens that a server without paging reserves per sequence. Default: 4096, or the model's limit if "
        "a sequence is longer.",
        low=1,
        panel=SEQUENCES,
    )
    kv_cache_dtype: str = option("auto", "KV cache format, as for `kvreclaim serve`.", panel=SEQUENCES)
    compression: str | None = option(
        None,
        "Policy and budget, such as triattention:budget=512,interval=128, or :budget=20% of the length. "
        "Default: no compression.",
        panel=SEQUENCES,
    )
    block_size: int = option(16, "Tokens per block.", low=1, panel=SEQUENCES)
    max_num_batched_tokens: int = option(
        2048, "Maximum number of tokens in one step.", low=1, panel=SEQUENCES
    )
    gpu: str | None = option(None, "Card, such as A100, H100 or 4090.", panel=CARD)
    memory_bytes: int | None = option(
        None, "Memory of the card in bytes, if it differs from the table or is not in it.", low=1, panel=CARD
    )
    weights: str = option(
        "auto",
        "Weight format: auto (from the config), bf16, fp8, int8, awq4, gptq4, gptq8, nf4, nvfp4, mxfp4, or "
        "the bits of a linear weight with its scales, such as 4.5.",
        panel=CARD,
    )
    utilization: float = option(
        0.92,
        "Share of the memory that the engine may use.",
        low=0.01,
        high=1.0,
        flags=("--utilization", "--utilisation", "--gpu-memory-utilization"),
        panel=CARD,
    )
    other_gib: float | None = option(
        None,
        "GiB for activations, graphs and the like. Default: an estimate.",
        low=0.0,
        high=1e6,
        panel=CARD,
    )
    tensor_parallel_size: int = option(1, "Number of cards per model.", low=1, high=64, panel=CARD)
    max_num_seqs: int = option(256, "Maximum number of sequences in one step.", low=1, panel=CARD)
    state_checkpoints: int | None = option(
        None,
        "Models with recurrent layers: states kept for prefix hits. Default: as many as --max-num-seqs.",
        low=0,
        panel=CARD,
    )
    state_drafts: int = option(
        0,
        "Models with recurrent layers: states kept for drafts, so many for each of --max-num-seqs.",
        low=0,
        high=64,
        panel=CARD,
    )
    calibration: str | None = option(
        None, "File of `kvreclaim calibrate-speed`. Default: the card's data sheet.", panel=CARD
    )
    bandwidth_share: float = option(
        BANDWIDTH_SHARE,
        "Share of the data sheet's bandwidth that is reached.",
        low=0.01,
        high=1.0,
        panel=CARD,
    )
    flops_share: float = option(
        FLOPS_SHARE, "Share of the data sheet's FLOP/s that is reached.", low=0.01, high=1.0, panel=CARD
    )
    price: float | None = option(
        None, "Dollars per hour and card. Default: the table's price.", low=0.0, high=1e6, panel=CARD
    )
    trace: str | None = option(
        None, "File of requests: Azure's CSV, or JSON lines like Mooncake's.", panel=TRACE
    )
    first: int | None = option(None, "Use only this many requests of the trace.", low=1, panel=TRACE)
    recompute_p99_ms: float | None = option(
        None,
        "Find how many sequences may run if recomputing a preempted one may take this long at p99. Needs "
        "--trace and a card.",
        low=0.1,
        high=1e9,
        panel=TRACE,
    )
    cards: str | None = option(
        None, "Cards to compare for the trace: all, or names, comma-separated.", panel=TRACE
    )
    slo: str | None = option(
        None, "Latency targets at p99, such as ttft=2s,tpot=60ms. Needs --cards.", panel=TRACE
    )

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "kv_cache_dtype", format_name(self.kv_cache_dtype))
        require(
            (self.sequences is None) == (self.prefix + self.own == 0),
            f"sequences is {self.sequences}, prefix {self.prefix} and own {self.own}; a load has a number of "
            "sequences, and tokens in each.",
            "sequences",
        )
        require(
            self.max_loss is None
            or (self.trace is None and (self.context is None) != (self.sequences is None)),
            "max_loss gives each length its budget, and a plan has one; pass --context or --sequences, and "
            "for a trace use `kvreclaim simulate`.",
            "max_loss",
        )
        self._check_trace()
        self._check_card()

    def _check_trace(self) -> None:
        for name in ("recompute_p99_ms", "cards"):
            require(
                getattr(self, name) is None or self.trace is not None,
                f"{name} goes by the lengths of a trace, and none is named; pass --trace.",
                "trace",
            )
        require(
            self.trace is None or self.recompute_p99_ms is not None or self.cards is not None,
            "trace is named, but no option uses it; pass --recompute-p99-ms, or --cards with --slo.",
            "trace",
        )
        require(
            self.first is None or self.trace is not None,
            "first limits a trace, and none is named; pass --trace, or leave first out.",
            "first",
        )
        require(
            (self.cards is None) == (self.slo is None),
            "cards are compared under targets; pass --cards and --slo together.",
            "slo",
        )

    def _check_card(self) -> None:
        has_card = self.gpu is not None or self.memory_bytes is not None
        alone = {
            "recompute_p99_ms": self.recompute_p99_ms,
            "calibration": self.calibration,
            "price": self.price,
            "state_checkpoints": self.state_checkpoints,
            "state_drafts": self.state_drafts or None,
            "tensor_parallel_size": self.tensor_parallel_size - 1 or None,
        }
        for name, value in alone.items():
            require(value is None or has_card, f"{name} is about one card; name it with --gpu.", "gpu")
        require(
            self.other_gib is None or has_card or self.cards is not None,
            "other_gib is about a card, and none is named; pass --gpu or --memory-bytes.",
            "gpu",
        )
        require(
            self.max_model_len is None or self.context is not None or self.sequences is not None,
            "max_model_len is what sequences reserve without paging, and none are named; pass --context, or "
            "--sequences.",
            "context",
        )
