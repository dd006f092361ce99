"""What the native back-end reads of caches in every format, against fp64 over what it gathers of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from format_cases import (
    NAMES,
    SHAPES,
    Rig,
    check_scores,
    check_written,
    fill,
)
from paged_oracle import Ask

from kvreclaim.ops import native
from kvreclaim.ops.formats import FORMATS

ISAS = native.supported_isas()
LENGTHS = [Ask(1, 53), Ask(1, 17), Ask(1, 1)]


def each_isa() -> Iterator:
    """Every format on the best set and on AVX2, two on the narrowest."""
    for isa in ISAS:
        known = isa in (ISAS[0], "avx2")
        for name in NAMES if known else ("int8", "int4"):
            if known or isa == ISAS[-1]:
                yield pytest.param((isa, name), id=f"{isa}-{name}")


@pytest.fixture(params=each_isa())
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    isa, name = request.param
    native.force_isa(isa)
    yield Rig(native, FORMATS[name])
    native.force_isa(ISAS[0])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_numbers_and_scores(rig: Rig, shape) -> None:
    w = fill(rig, shape, LENGTHS)
    check_written(rig, w)
    for ask in range(len(LENGTHS)):
        check_scores(rig, w, ask, style="interleaved" if ask else "half")
