"""Settings of the decode benchmark, checked without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvreclaim.bench.plans import ACTIVATIONS, KERNELS, LLAMACPP, LLAMACPP_PYTHON, VLLM_PYTHON, PolicyPlan
from kvreclaim.bench.systems.base import NAMES, OURS, Fill, Point
from kvreclaim.checks import check_choice, require
from kvreclaim.compression.spec.traits import traits
from kvreclaim.compression_settings import AUTO, parse_budget
from kvreclaim.config import format_names
from kvreclaim.options import option

if TYPE_CHECKING:
    from kvreclaim.compression.config import CompressionConfig

PEERS = ("transformers", "vllm")


@dataclass(frozen=True, kw_only=True)
class DecodePlan(PolicyPlan):
    """Decode speed. steps: per timed slice, fewer if slice_s would be exceeded; limit_s: per system and
    point, all rounds together.

    kv_cache_dtypes: each of `systems` runs in each of these KV formats; one in a named format is called
                     SYSTEM:FORMAT
    activations:     and with each of these activations of packed weights: SYSTEM@ACTIVATIONS
    prompts:         prompt lengths with timed prefill, alone and alternating
    """

    kernels: str = option("auto", KERNELS)
    vllm_python: Path | None = option(None, VLLM_PYTHON)
    systems: tuple[str, ...] = option(NAMES, "Our systems: full and policies, comma-separated.")
    peers: tuple[str, ...] = option(
        (),
        "Engines to compare with, comma-separated: transformers, vllm; for a .gguf file "
        "llamacpp (its cache in f16), llamacpp:q8_0, llamacpp:q4_0.",
    )
    llamacpp_python: Path = option(Path(".llamacpp-env/bin/python"), LLAMACPP_PYTHON)
    vllm_compile: bool = option(False, "Run vLLM with torch.compile.")
    contexts: tuple[int, ...] = option((1024, 8192, 16384, 32768), "Tokens in each cache.")
    batches: tuple[int, ...] = option((1, 8, 32), "Sequences decoded together.")
    kv_cache_dtypes: tuple[str, ...] = option(
        (AUTO,),
        "KV formats, comma-separated, timed in turns: auto, bf16, int8, int4 and so on.",
        flags=("--kv-cache-dtype",),
    )
    activations: tuple[str, ...] = option(
        (AUTO,),
        "Activation formats for packed weights, comma-separated, timed in turns: auto, int16, int8, exact.",
        flags=("--quantized-activations",),
    )
    prompts: tuple[int, ...] = option((), "Prompt lengths to time, comma-separated.")
    rounds: int = option(3, "Timed slices per system; systems take turns.", low=1)
    steps: int = option(64, "Maximum steps of a timed slice.", low=1)
    slice_s: float = option(4.0, "Maximum seconds of a timed slice.", low=0.0, high=86_400.0)
    limit_s: float = option(120.0, "Maximum seconds of one system at one point.", low=0.0, high=86_400.0)
    fill: Fill = option(
        "synthetic",
        "How caches are filled: synthetic or prefill.",
        choices=("synthetic", "prefill"),
        typed_as=str,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_cache_dtypes", format_names(self.kv_cache_dtypes))
        require(
            set(self.kv_cache_dtypes) == {AUTO} or isinstance(parse_budget(self.budget), int),
            f"budget is {self.budget!r}, a share of the prompt's bytes in the model's dtype, which is "
            f"another number of tokens in each of {', '.join(self.kv_cache_dtypes)}; pass tokens.",
            "budget",
        )
        super().__post_init__()
        unknown = [
            *(set(self.peers) - {*PEERS, *LLAMACPP}),
            *(name for name in self.systems if not _is_ours(name)),
        ]
        require(
            not unknown,
            f"no system is called {unknown[:1]}; allowed: kvreclaim-full, kvreclaim- and a policy, and "
            f"{', '.join((*PEERS, *LLAMACPP))}.",
        )
        require(
            "vllm" not in self.peers or self.vllm_python is not None,
            "vllm is among the peers, but --vllm-python is not set; run `make vllm-env` and pass "
            ".vllm-env/bin/python.",
        )
        if any(name in LLAMACPP for name in self.peers):
            self.check_llamacpp(self.llamacpp_python)
        for each in self.activations:
            check_choice("--quantized-activations", each, ACTIVATIONS)
        require(
            min((*self.contexts, *self.batches), default=0) > 0 and min(self.prompts, default=1) > 0,
            "contexts, batches and prompts must be positive; raise them.",
        )

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return self.contexts

    @property
    def names(self) -> tuple[str, ...]:
        """All systems, peers last."""
        ours = (
            system + (f":{form}" if form != AUTO else "") + (f"@{activations}" if activations != AUTO else "")
            for system in self.systems
            for form in self.kv_cache_dtypes
            for activations in self.activations
        )
        return (*ours, *self.peers)

    def points(self) -> list[Point]:
        """The grid, smallest first."""
        new_tokens = (self.rounds + 1) * max(self.steps, self.interval) + 8
        return [Point(c, b, new_tokens, self.fill) for c in self.contexts for b in self.batches]

    def kv_cache_dtype(self, name: str) -> str:
        """KV format of a kvreclaim system."""
        return name.partition("@")[0].partition(":")[2] or AUTO

    def activations_of(self, name: str) -> str:
        """Activations of a kvreclaim system."""
        return name.partition("@")[2] or AUTO

    def compression(self, name: str) -> CompressionConfig | None:
        """Compression of a system; None: it keeps the full cache."""
        system = name.partition("@")[0].partition(":")[0]
        return self.policy(system.removeprefix(OURS)) if system.startswith(OURS) else None


def _is_ours(name: str) -> bool:
    """Whether a name is the full cache or a policy of kvreclaim."""
    if name.startswith(OURS) and name != NAMES[0]:
        traits(name.removeprefix(OURS))
    return name.startswith(OURS)
