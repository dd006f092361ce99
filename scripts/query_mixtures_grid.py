"""What the ablations of query mixtures measure: policies, options and calibrations, by group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

DEFAULT_OFFSETS = (1, 16, 256, 4096, 65536)
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


PLAIN = Calibration()
REFERENCE = Row("mixture, 16 centres")
GROUPS: dict[str, tuple[Row, ...]] = {
    "main": (
        Row("oracle, most attention", "oracle"),
        Row("oracle, total attention", "oracle", {"aggregate": "sum"}),
        REFERENCE,
        Row("mixture, 16 centres, x ||v||", options={"value_norm": True}),
        Row("mixture, 32 centres", calibration=Calibration(32)),
        Row("mixture, 32 centres, x ||v||", options={"value_norm": True}, calibration=Calibration(32)),
        Row("mixture, 16 centres, x ||v||, T = 2", options={"value_norm": True, "temperature": 2.0}),
        Row("mixture, 16 centres, x ||v||, T = 4", options={"value_norm": True, "temperature": 4.0}),
        Row("key norm, large kept", "knorm", {"keep": "large"}),
        Row("triattention", "triattention"),
        Row("triattention, norm term only", "triattention", {"use_trig": False}),
        Row("expected_attention", "expected_attention"),
        Row("streaming_llm", "streaming_llm"),
        Row("random", "random"),
    ),
    "centres": tuple(
        Row(f"{n} centre{'s' * (n > 1)}", calibration=Calibration(n)) for n in (1, 2, 4, 8, 16, 32, 64)
    ),
    "offsets": (
        Row("offset 1", options={"offsets": (1,)}),
        Row("offsets 1, 16, 256, 4096, 65536", options={}),
        Row("offsets 2^0 ... 2^16", options={"offsets": MANY_OFFSETS}),
        Row("offsets 16, 64, 256, 1024, 4096", options={"offsets": (16, 64, 256, 1024, 4096)}),
    ),
    "shared": tuple(
        Row(
            f"{n} centres per {'KV head' if shared else 'query head'}",
            calibration=Calibration(n, shared=shared),
        )
        for n, shared in ((16, False), (16, True), (32, True), (64, True), (32, False))
    ),
    "merged": (
        Row("32 centres", calibration=Calibration(32)),
        *(
            Row(f"32, weight at least {w:.1%}", calibration=Calibration(32, min_weight=w))
            for w in (0.01, 0.02, 0.04)
        ),
        *(
            Row(f"32, distance at least {d}", calibration=Calibration(32, min_distance=d))
            for d in (0.2, 0.4, 0.6)
        ),
    ),
    "score": (
        REFERENCE,
        Row("x ||v||", options={"value_norm": True}),
        Row("softmax over the candidates", options={"normalise": "candidates"}),
        Row("collapsed", options={"form": "collapsed"}),
        Row("collapsed, x ||v||", options={"form": "collapsed", "value_norm": True}),
        Row("weighted sum over the centres", options={"form": "sum"}),
        *(Row(f"temperature {t:g}", options={"temperature": t}) for t in (1.5, 2.0, 4.0, 8.0)),
        *(
            Row(f"temperature {t:g}, x ||v||", options={"temperature": t, "value_norm": True})
            for t in (2.0, 4.0, 8.0)
        ),
        *(Row(f"segments, n = {n}", f"segments(query_mixture, n={n})") for n in (4, 8)),
    ),
    "text": (
        REFERENCE,
        *(
            Row(f"calibrated on: {text}", calibration=replace(PLAIN, text=text))
            for text in ("short", "long", "filler", "prompt", "trace")
        ),
        *(
            Row(f"start of the clusters: seed {seed}", calibration=replace(PLAIN, seed=seed))
            for seed in (1, 2)
        ),
    ),
}


def rows(groups: list[str]) -> Iterator[tuple[str, Row]]:
    """(group, row) of the groups asked for, in their order."""
    for group in groups:
        for row in GROUPS[group]:
            yield group, row
