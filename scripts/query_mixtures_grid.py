"""What the ablations of query mixtures measure: policies, options and calibrations, by group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

MANY_OFFSETS = tuple(2**n for n in range(17))


@dataclass(frozen=True)
class Calibration:
    """How the statistics are made.

    text:  "task" (documents of the measured size that evaluation never draws), "short" and "long" (half and
           one and a half times the size), "filler" (words in another order), "prompt" and "trace" (only the
           queries of that part count)
    """

    num_centers: int = 16
    shared: bool = False
    min_weight: float = 0.0
    min_distance: float = 0.0
    text: str = "task"
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One line of a table: a policy with its options, and the statistics it reads."""

    label: str
    policy: str = "query_mixture"
    options: dict[str, object] = field(default_factory=dict)
    calibration: Calibration = Calibration()

    def key(self, fraction: float) -> str:
        """Equal for equal measurements, whatever they are called."""
        settings = {
            "policy": self.policy,
            "fraction": fraction,
            **{f"o.{k}": v for k, v in self.options.items()},
        }
        return repr(sorted((settings | asdict(self.calibration)).items(), key=lambda item: item[0]))


MIXTURE = "query_mixture(temperature=4.0, value_norm=true)"
PLAIN = Calibration()
BEST: dict[str, object] = {"temperature": 4.0, "value_norm": True}
OLD: dict[str, object] = {"temperature": 1.0, "value_norm": False}
REFERENCE = Row("T = 4, × ‖v‖, 16 centres", options=BEST)
GROUPS: dict[str, tuple[Row, ...]] = {
    "main": (
        REFERENCE,
        Row("T = 4, × ‖v‖, 32 centres", options=BEST, calibration=Calibration(32)),
        Row("T = 1, 16 centres", options=OLD),
        Row("T = 1, 32 centres", options=OLD, calibration=Calibration(32)),
        Row("key norm, large kept", "knorm", {"keep": "large"}),
        Row("triattention", "triattention"),
        Row("triattention, norm term only", "triattention", {"use_trig": False}),
        Row("oracle, most attention", "oracle"),
        Row("expected_attention", "expected_attention"),
        Row("streaming_llm", "streaming_llm"),
        Row("random", "random"),
    ),
    "temperature": tuple(
        Row(f"T = {t:g}{', × ‖v‖' * norm}", options={"temperature": t, "value_norm": norm})
        for norm in (False, True)
        for t in (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
    ),
    "centres": tuple(
        Row(f"{n} centre{'s' * (n > 1)}", options=BEST, calibration=Calibration(n))
        for n in (1, 2, 4, 8, 16, 32, 64)
    ),
    "offsets": (
        Row("offset 1", options={**BEST, "offsets": (1,)}),
        Row("offsets 1, 16, 256, 4096, 65536", options=BEST),
        Row("offsets 2^0 ... 2^16", options={**BEST, "offsets": MANY_OFFSETS}),
        Row("offsets 16, 64, 256, 1024, 4096", options={**BEST, "offsets": (16, 64, 256, 1024, 4096)}),
    ),
    "shared": tuple(
        Row(
            f"{n} centres per {'KV head' if shared else 'query head'}",
            options=BEST,
            calibration=Calibration(n, shared=shared),
        )
        for n, shared in ((16, False), (16, True), (32, True), (64, True))
    ),
    "merged": (
        Row("32 centres", options=BEST, calibration=Calibration(32)),
        *(
            Row(
                f"32 centres, weight at least {w:.0%}",
                options=BEST,
                calibration=Calibration(32, min_weight=w),
            )
            for w in (0.01, 0.02, 0.04)
        ),
        *(
            Row(
                f"32 centres, distance at least {d}",
                options=BEST,
                calibration=Calibration(32, min_distance=d),
            )
            for d in (0.3, 0.6)
        ),
    ),
    "form": (
        REFERENCE,
        Row("softmax over the candidates", options={**BEST, "normalise": "candidates"}),
        Row("collapsed", options={**BEST, "form": "collapsed"}),
        Row("collapsed, T = 1", options={**BEST, "form": "collapsed", "temperature": 1.0}),
        Row("weighted sum over the centres", options={**BEST, "form": "sum"}),
        Row("weighted sum over the centres, T = 1", options={**OLD, "form": "sum"}),
        *(Row(f"segments, n = {n}", f"segments({MIXTURE}, n={n})") for n in (4, 8)),
    ),
    "text": (
        REFERENCE,
        *(
            Row(f"calibrated on: {text}", options=BEST, calibration=replace(PLAIN, text=text))
            for text in ("short", "long", "filler", "prompt", "trace")
        ),
        *(
            Row(f"start of the clusters: seed {seed}", options=BEST, calibration=replace(PLAIN, seed=seed))
            for seed in (1, 2)
        ),
    ),
}


def rows(groups: list[str]) -> Iterator[tuple[str, Row]]:
    """(group, row) of the groups asked for, in their order."""
    for group in groups:
        for row in GROUPS[group]:
            yield group, row
