"""select_top takes what a stable descending sort puts first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.native.scoring import select_top

INF = float("inf")


def assert_selects(scores: Tensor, places: int) -> None:
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :places]
    got = select_top(scores, places)
    assert torch.equal(got, order.sort(-1).values)


@pytest.mark.usefixtures("isa", "threads")
@pytest.mark.parametrize("columns", [1, 2, 100, 2176, 8320])
def test_random_scores(columns: int) -> None:
    scores = torch.randn(9, columns, generator=torch.Generator().manual_seed(columns))
    for places in {0, 1, columns // 2, columns - 1, columns}:
        assert_selects(scores, places)


@pytest.mark.parametrize("places", [0, 1, 3, 50, 63, 64])
def test_ties_go_to_the_lowest_index(places: int) -> None:
    rng = torch.Generator().manual_seed(places)
    assert_selects(torch.zeros(3, 64), places)
    assert_selects(torch.randint(0, 3, (5, 64), generator=rng).float(), places)
    assert_selects(torch.full((2, 64), -INF), places)
    assert_selects(torch.where(torch.rand(4, 64, generator=rng) < 0.5, -INF, 1.0), places)
    assert_selects(torch.where(torch.rand(4, 64, generator=rng) < 0.5, -0.0, 0.0), places)


NUMBERS = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, INF, -INF, 1e-45, -1e-45])


@settings(max_examples=200, deadline=None)
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=60), data=st.data())
def test_any_numbers(numbers: list[float], data: st.DataObject) -> None:
    scores = torch.tensor([numbers, numbers[::-1]])
    assert_selects(scores, data.draw(st.integers(0, len(numbers))))


@pytest.mark.parametrize("sign", [1, -1])
def test_nan_is_refused(sign: int) -> None:
    scores = torch.randn(4, 50)
    scores[3, 49] = torch.copysign(torch.tensor(float("nan")), torch.tensor(float(sign)))
    for places in (0, 10):
        with pytest.raises(InvalidArgumentError, match="NaN"):
            select_top(scores, places)


def test_more_places_than_columns() -> None:
    with pytest.raises(ValueError, match="more places"):
        select_top(torch.randn(2, 3), 4)
