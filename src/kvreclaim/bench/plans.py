"""Settings of the benchmarks, validated without torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreclaim import demo_model
from kvreclaim.bench.systems.base import BLOCK_SIZE, SystemSetup
from kvreclaim.checks import check_choice, require
from kvreclaim.compression_settings import AUTO, CompressionSettings, parse_budget
from kvreclaim.options import check_options, option
from kvreclaim.schedule.budget.footprint import share_in_blocks

if TYPE_CHECKING:
    from kvreclaim.compression.config import CompressionConfig

DTYPES = ("bfloat16", "float32")
MODEL = Path("bench_models/qwen3-26m")
THREADS = "CPU threads of every system."
KERNELS = "kvreclaim's kernels: auto, reference, native or triton."
LLAMACPP_PYTHON = "Interpreter of llama.cpp's environment (`make llamacpp-env`)."
LLAMACPP = {"llamacpp": "f16", "llamacpp:q8_0": "q8_0", "llamacpp:q4_0": "q4_0"}
"""Type of keys and values by the peer's name."""
FP8 = "fp8"
ACTIVATIONS = (AUTO, "int16", "int8", "exact")
VLLM_PYTHON = "Interpreter of vLLM's environment (`make vllm-env`)."
OWN_VLLM = Path(".vllm-env/bin/python")
VLLM_CASES = ("small", "large", "serve", "plenty")
OBJECTIVES = ("ttft", "tpot", "e2el")
PROMPTS = ("random", "text", "lookups")
DEMO = "demo"
"""The demo model, which needs its own documents."""
VERIFY_SYSTEMS = ("full", "lossy", "verify", "full-host", "verify-host")
"""Location of the full cache: in the pool or on the host; lossy: none."""


def budget_in_tokens(budget: object, lengths: tuple[int, ...]) -> int:
    """Return the budget in tokens. lengths: of prompts; if there is one, the budget may be a share of it.

    Raises: InvalidArgumentError.
    """
    given = parse_budget(budget)
    if isinstance(given, int):
        return given
    require(
        len(lengths) == 1,
        f"budget is {budget!r}, a share of the prompt's tokens, but this benchmark's prompts do not have one "
        "length; pass a number of tokens, or one context where there is --contexts.",
        "budget",
    )
    plain = CompressionSettings()
    return share_in_blocks(given, lengths[0], BLOCK_SIZE, plain.sinks + plain.recent)


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A benchmark of one model directory."""

    model: Path = option(MODEL, "Model directory; `make bench-model` makes this one.")
    threads: int = option(2, THREADS, low=1, high=1024)
    dtype: str = option(
        AUTO,
        "auto (a .gguf file as it runs by default, else bfloat16), bfloat16 or float32.",
        choices=(AUTO, *DTYPES),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.dtype == AUTO and self.model.suffix != ".gguf":
            object.__setattr__(self, "dtype", "bfloat16")
        require(
            self.model.is_dir() or (self.model.suffix == ".gguf" and self.model.is_file()),
            f"--model is {str(self.model)!r}, which is no directory and no .gguf file; run `make "
            "bench-model`, or name another one.",
        )

    @property
    def setup(self) -> SystemSetup:
        return SystemSetup(self.model, self.dtype, self.threads)

    def facts(self) -> dict[str, Any]:
        """Facts for every row."""
        return {"model": self.model.name, "dtype": self.dtype, "threads": self.threads}

    def check_llamacpp(self, python: Path) -> None:
        """Raises: InvalidArgumentError if llama.cpp cannot run this model, or is not installed."""
        require(
            self.model.suffix == ".gguf",
            f"--model is {str(self.model)!r}, and llama.cpp reads .gguf files; name one, or leave llamacpp "
            "out of --peers.",
        )
        require(
            python.is_file(),
            f"llamacpp is among the peers, but --llamacpp-python is {str(python)!r}, which is no file; run "
            "`make llamacpp-env`, or leave llamacpp out of --peers.",
        )


@dataclass(frozen=True, kw_only=True)
class PolicyPlan(ModelPlan):
    """A benchmark with policies, all at one budget."""

    budget: int = option(
        2048,
        "Tokens that the policies keep, or where all prompts have one length a share of it: 0.2 or 20%.",
        low=1,
        unit=" tokens",
        typed_as=str,
    )
    interval: int = option(128, "Tokens over the budget at which policies compress.", low=1, unit=" token")

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", budget_in_tokens(self.budget, self.prompt_lengths))
        super().__post_init__()

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Lengths of the prompts; none if they are random."""
        return ()

    def policy(self, name: str) -> CompressionConfig | None:
        """None: "full", the full cache."""
        from kvreclaim.compression.config import CompressionConfig

        if name == "full":
            return None
        return CompressionConfig(name, self.budget, self.interval, recent=min(128, self.budget // 4))


@dataclass(frozen=True, kw_only=True)
class ServePlan(PolicyPlan):
    """Serving over HTTP compared with the engine alone, and with other servers.

    num_prompt, num_output: tokens of each request
    compress: the policy of every request, on both sides
    arrivals: requests of the run under load, which arrive at load x the engine's offline rate at the most
              streams; 0: no such run
    """

    peers: tuple[str, ...] = option(
        (),
        "Servers to compare with, comma-separated: for a .gguf file llamacpp (llama-server, its cache in "
        "f16), llamacpp:q8_0, llamacpp:q4_0.",
    )
    llamacpp_python: Path = option(Path(".llamacpp-env/bin/python"), LLAMACPP_PYTHON)
    activations: str = option(
        AUTO,
        "Our activation format for packed weights: auto, int16, int8, exact.",
        choices=ACTIVATIONS,
        flags=("--quantized-activations",),
    )
    streams: tuple[int, ...] = option((1, 8, 32, 64), "Concurrent streams.")
    num_prompt: int = option(64, "Prompt tokens per request.", low=1, flags=("--prompt",))
    num_output: int = option(256, "Generated tokens per request.", low=1, flags=("--output",))
    rounds: int = option(7, "Rounds of both sides, which take turns.", low=1)
    threads: int = option(1, THREADS, low=1, high=1024)
    num_blocks: int = option(4096, "Number of blocks in the pool, on both sides.", low=1)
    dtype: str = option("auto", "auto, bfloat16 or float32.")
    compress: str = option("full", "Compression policy of every request.", flags=("--policy",))
    spread_compression: bool = option(True, "Compress requests at different steps.")
    engine_process: bool = option(True, "Run the server's engine in a process of its own, not in a thread.")
    arrivals: int = option(0, "Requests of an extra run under load; 0: no such run.", low=0)
    load: float = option(0.7, "Load of that run, as a share of the offline speed.", low=0.01, high=100.0)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.streams) and min(self.streams) > 0,
            f"--streams is {self.streams}; pass one or more numbers of concurrent streams, each at least 1.",
        )
        for name in self.peers:
            check_choice("--peers", name, LLAMACPP)
        if self.peers:
            self.check_llamacpp(self.llamacpp_python)

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return (self.num_prompt,)


@dataclass(frozen=True, kw_only=True)
class VllmPlan(ModelPlan):
    """vLLM with and without the plugin. stats: of the model's queries; None takes its own file."""

    cases: tuple[str, ...] = option(VLLM_CASES, "small, large, serve, plenty; comma-separated.")
    policy: str = option("query_mixture", "Compression policy of the side with the plugin.")
    budget: int = option(256, "Tokens that it keeps in cases serve and plenty.", low=1, typed_as=str)
    interval: int = option(
        128, "Tokens over the budget at which the policy compresses.", low=1, unit=" token"
    )
    stats: Path | None = option(None, "File of query statistics. Default: the model's own.")
    kv_cache_dtype: str = option(
        AUTO,
        "auto, or fp8 for the side with the plugin, which then centres keys, and a third side without it; "
        "all have as many bytes of cache.",
        choices=(AUTO, FP8),
    )
    python: Path = option(
        None, f"{VLLM_PYTHON} Default: {OWN_VLLM}, else this one.", flags=("--vllm-python",)
    )
    threads: int = option(1, THREADS, low=1, high=1024)
    gpu_check: bool = option(
        False,
        "Instead of the cases: what works on this machine's own card, or CPU, as one page. Without --model "
        "on the demo model.",
    )
    plot: Path | None = option(None, "Write blocks in use and running requests over time to this image.")
    rate: float = option(4.0, "Requests per second in cases serve and plenty.", low=0.001, high=1000.0)
    turns: int = option(2, "Runs per side.", low=1)
    prompts: str = option(
        "random",
        "Prompts of case serve: random tokens, text, or lookups, which have answers to judge.",
        choices=PROMPTS,
    )
    goodput: tuple[str, ...] = option(
        ("ttft:10000", "tpot:200"),
        "Latency targets, comma-separated: ttft:MS, tpot:MS, e2el:MS.",
    )
    seed: int = option(0, "Seed of the first run; each further run takes the next.", low=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", budget_in_tokens(self.budget, ()))
        if self.gpu_check and self.model == MODEL:
            object.__setattr__(self, "model", demo_model())
        if self.python is None:
            object.__setattr__(self, "python", OWN_VLLM if OWN_VLLM.is_file() else Path(sys.executable))
        super().__post_init__()
        for name in self.cases:
            check_choice("--cases", name, VLLM_CASES)
        require(
            self.python.is_file(),
            f"--vllm-python is {str(self.python)!r}, which is no file; run `make vllm-env`, or pass the "
            "interpreter of an environment with vLLM and kvreclaim.",
        )
        for objective in self.goodput:
            name, _, limit = objective.partition(":")
            require(
                name in OBJECTIVES and limit.isdecimal() and int(limit) > 0,
                f"--goodput has {objective!r}; pass {', '.join(OBJECTIVES)} with milliseconds after a "
                "colon, such as ttft:10000,tpot:200.",
            )


@dataclass(frozen=True, kw_only=True)
class LosslessPlan:
    """Python's documentation is continued greedily by a language model.

    model:   None: the real model, else the demo model
    tokens:  generated by each sequence; the first ones, up to the slowest prompt, are not timed
    """

    model: Path | None = option(
        None, f"Model directory, or {DEMO}. Default: the model of `kvreclaim fetch`, else {DEMO}."
    )
    dtype: str = option("bfloat16", "bfloat16 or float32.", choices=DTYPES)
    threads: int = option(2, THREADS, low=1, high=1024)
    contexts: tuple[int, ...] = option((16384,), "Tokens of each prompt, comma-separated.")
    batches: tuple[int, ...] = option((1, 8), "Sequences at once, comma-separated.")
    policy: str = option("streaming_llm", "Compression policy, which drafts in verify mode.")
    budget: int = option(
        1536,
        "Tokens that the policy keeps, or a share of one context's: 0.2 or 20%.",
        low=1,
        typed_as=str,
    )
    drafts: int = option(5, "Maximum number of drafts between two verifications.", low=1, high=64)
    tokens: int = option(96, "Tokens that each sequence generates.", low=2)
    rounds: int = option(3, "Timed rounds, of which medians are shown.", low=1)
    systems: tuple[str, ...] = option(VERIFY_SYSTEMS, "Systems, comma-separated.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", budget_in_tokens(self.budget, self.contexts))
        check_options(self)
        unknown = [name for name in self.systems if name not in VERIFY_SYSTEMS]
        require(not unknown, f"systems holds {unknown!r}; they are {', '.join(map(repr, VERIFY_SYSTEMS))}.")
        require("full" in self.systems, "systems lacks 'full', which the others are compared with; add it.")
        require(
            bool(self.contexts and self.batches) and min(*self.contexts, *self.batches) > 0,
            f"contexts is {self.contexts} and batches {self.batches}; pass numbers above 0.",
        )

    def facts(self) -> dict[str, Any]:
        """Facts for every row."""
        return {
            "dtype": self.dtype,
            "threads": self.threads,
            "policy": self.policy,
            "budget": self.budget,
            "drafts": self.drafts,
        }


@dataclass(frozen=True, kw_only=True)
class SpeedPlan(PolicyPlan):
    """Random load for `seconds`, at changing numbers of requests at once."""

    seconds: float = option(60.0, "Seconds of random load.", low=1.0, high=86_400.0, unit=" s")
    longest: int = option(512, "Maximum tokens of a prompt, and of an answer.", low=8)
    max_num_seqs: int = option(32, "Maximum number of sequences in one step.", low=1)
    num_blocks: int = option(4096, "Number of blocks in the pool.", low=1)
    compress: str = option("full", "Compression policy of every request.", flags=("--policy",))
    seed: int = 0
