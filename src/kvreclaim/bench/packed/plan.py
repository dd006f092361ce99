"""What `bench packed` measures: known, and checked, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvreclaim.bench.plans import ModelPlan
from kvreclaim.checks import require
from kvreclaim.options import option

ACTIVATIONS = ("int16", "int8")
FORMATS = {
    "AWQ": ("zero", 128),
    "Q4_1": ("min", 32),
    "Q4_K": ("q4_k", 32),
    "nf4": ("table", 64),
    "Q6_K": ("q6_k", 16),
    "Q8_0": ("q8_0", 32),
}
"""By the name in the table: the kind of rows and the columns that share a scale."""


@dataclass(frozen=True, kw_only=True)
class PackedPlan(ModelPlan):
    """Up to three parts: products of one matrix; decode of a model and of packed ones in turns; how far the
    packed models' logits move where their activations are rounded."""

    packed: tuple[Path, ...] = option(
        (), "Packed models of the same shape, comma-separated; `make bench-model` makes two of Qwen3-0.6B's."
    )
    products: bool = option(True, "Products of one matrix.")
    size: int = option(4096, "Rows and columns of that matrix, a multiple of 256.", low=256)
    rows: tuple[int, ...] = option((1, 8, 64, 512), "Rows of the input, comma-separated.")
    contexts: tuple[int, ...] = option((1024,), "Tokens in each cache, comma-separated.")
    batches: tuple[int, ...] = option((1, 8), "Sequences, comma-separated.")
    steps: int = option(16, "Of a timed slice.", low=1)
    rounds: int = option(5, "Timed, in turns.", low=1)
    text: Path | None = option(None, "UTF-8 text whose logits are compared; else random tokens.")
    tokens: int = option(512, "Of that text.", low=2)

    def __post_init__(self) -> None:
        if self.packed:
            super().__post_init__()
        for path in self.packed:
            require(path.exists(), f"--packed names {str(path)!r}, which is missing; run `make bench-model`.")
        require(self.size % 256 == 0, f"--size is {self.size}; pass a multiple of 256.")
        require(
            min(self.rows) > 0 and min(self.contexts) > 0 and min(self.batches) > 0,
            "--rows, --contexts and --batches take positive numbers.",
        )
