"""Settings of a calibration, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.checks import check_int
from kvreclaim.compression.conformal import LEAST_VALUES
from kvreclaim.compression.trial import FORMATS
from kvreclaim.compression_settings import AUTO
from kvreclaim.config import format_names
from kvreclaim.options import check_options, option


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Amount of text that calibration reads."""

    max_tokens: int = option(6144, "Maximum number of tokens to read from the text.", low=1)
    trial: int = option(1, "Windows of text to hold out for the trial of the candidates; 0: no trial.", low=0)
    candidates: tuple[str, ...] = option((), "More policies to try, besides the standard ones.")
    curve: tuple[int, ...] = option(
        (),
        "Lengths in tokens, such as 1024,2048, at which to measure the loss over budgets, from which "
        "--kv-max-loss chooses. Default: none.",
    )
    curve_documents: int = option(
        20, "Held-out documents of each length and content of the curve.", low=LEAST_VALUES
    )
    curve_formats: tuple[str, ...] = option(
        FORMATS,
        "KV cache dtypes of the curve, from which --kv-max-loss chooses; auto (the model's own) is one. "
        "Each takes the same time.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "curve_formats", format_names((AUTO, *self.curve_formats)))
        for length in self.curve:
            check_int("a length of the curve", length, 1)


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Statistics kept of the queries; compression.Clustering checks them."""

    num_centers: int = option(16, "Query centers per head; 0 keeps only moments.", flags=("--centers",))
    shared_centers: bool = option(False, "Share centers among the query heads of a KV head.")
    seed: int = option(0, "Seed of the clustering.")
    surrogate: bool = option(True, "Repeat the text and learn which tokens and heads the repetition needs.")
    kvzap: str | None = option(
        None, "Score weights on hidden states: fit them (linear or mlp), or load them from a directory."
    )
    max_points: int = option(4096, "Queries per head that are clustered, evenly spaced over the text.", low=1)
