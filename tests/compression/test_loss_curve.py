"""A promised budget is the conformal quantile of what held-out documents needed."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from random import Random

import pytest
from compression_oracles import model_facts, query_stats
from curves import cell, curve
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvreclaim.compression.conformal import conformal_quantile
from kvreclaim.compression.loss_curve import LossCell, LossCurve, read_curve
from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import InvalidArgumentError

BUDGETS = (160, 256, 512)
TWO = curve(
    "knorm",
    {
        ("prose", 1024): {256: 0.05, 512: 0.01},
        ("lookups", 1024): {256: 0.2, 512: 0.02},
        ("prose", 2048): {256: 0.5, 1024: 0.03},
        ("lookups", 2048): {256: 0.03, 1024: 0.0},
    },
)


@given(st.lists(st.integers(0, 9), min_size=19, max_size=130))
def test_the_quantile_is_the_smallest_value_at_or_below_which_enough_lie(values: list[int]) -> None:
    """A further value is equally likely to have any rank among n + 1."""
    enough = [
        v for v in values if Fraction(sum(w <= v for w in values), len(values) + 1) >= Fraction(95, 100)
    ]
    assert conformal_quantile(values) == min(enough)


@pytest.mark.parametrize("count", [19, 20, 59])
def test_a_further_value_stays_below_as_often_as_promised(count: int) -> None:
    """Continuous values: exactly ceil(.95 (n + 1)) of n + 1 ranks."""
    rng, trials = Random(count), 20_000
    drawn = ([rng.paretovariate(0.7) for _ in range(count + 1)] for _ in range(trials))
    covered = sum(last <= conformal_quantile(values) for *values, last in drawn) / trials
    expected = -(-(count + 1) * 95 // 100) / (count + 1)
    assert covered == pytest.approx(expected, abs=0.006)  # four standard deviations; the seed is fixed
    assert expected >= 0.95


@st.composite
def cells(draw: st.DrawFn) -> LossCell:
    row = st.tuples(*[st.sampled_from([0.0, 0.01, 0.02, 0.1])] * len(BUDGETS))
    losses = tuple(draw(st.lists(row, min_size=19, max_size=40)))
    return LossCell(content="prose", num_tokens=1024, right=0.5, budgets=BUDGETS, losses=losses)


@given(cells(), st.sampled_from([0.0, 0.01, 0.05, 1.0]))
def test_a_need_is_the_smallest_budget_from_which_on_no_more_is_lost(cell: LossCell, most: float) -> None:
    needs = []
    for losses in cell.losses:
        lost = {**dict(zip(BUDGETS, losses, strict=True)), 1024: 0.0}
        needs.append(min(b for b in lost if all(lost[c] <= most for c in lost if c >= b)))
    assert [cell.need(losses, most) for losses in cell.losses] == needs
    assert cell.promised(most) == sorted(needs)[-(-(len(needs) + 1) * 95 // 100) - 1]


@pytest.mark.parametrize(
    ("max_loss", "num_tokens", "content", "budget"),
    [
        (0.02, 1024, "prose", 512),
        (0.05, 1024, "prose", 256),
        (0.05, 1024, "lookups", 512),
        (0.05, 1024, None, 512),  # the strictest content
        (0.01, 1024, None, None),  # look-ups need everything
        (0.05, 100, "prose", 256),  # shorter ones get the shortest length's
        (0.05, 1025, "prose", 1024),  # between two lengths the longer one's
        (0.05, 1025, "lookups", 256),
        (0.02, 2048, "prose", None),
        (0.02, 2048, "lookups", 1024),
        (1.0, 2049, "prose", None),  # nothing is promised beyond the longest
    ],
)
def test_budgets_by_length_and_content(max_loss, num_tokens, content, budget) -> None:
    assert TWO.promised(max_loss, num_tokens, content) == budget


def test_a_curve_is_whole() -> None:
    with pytest.raises(ValidationError, match="every content at every length"):
        LossCurve(policy="knorm", cells=TWO.cells[:3])
    for losses in ({512: 0.1, 256: 0.1}, {512: 0.0, 1024: 0.0}):
        with pytest.raises(ValidationError, match="budgets must rise"):
            cell("prose", 1024, losses)
    with pytest.raises(ValidationError):
        LossCell(content="prose", num_tokens=9, right=0.5, budgets=(5,), losses=((0.1,),) * 18)


def test_it_stays_in_the_statistics_and_is_read_without_torch(tmp_path) -> None:
    file = tmp_path / "stats.safetensors"
    stats = query_stats(model_facts(2))
    stats.save(file)
    with pytest.raises(InvalidArgumentError, match=r"no loss curve; run `kvreclaim calibrate --curve"):
        read_curve(file)
    stats.with_curve(TWO).save(file)
    assert QueryStats.load(file).metadata.curve == read_curve(file) == TWO
    script = (
        "import sys; from kvreclaim.compression.loss_curve import read_curve;"
        f"print(read_curve({str(file)!r}).model_dump_json()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == TWO.model_dump(mode="json")
    for broken in (tmp_path / "nothing.safetensors", tmp_path / "text.safetensors"):
        with pytest.raises(InvalidArgumentError, match=r"cannot be read \(.*calibrate --curve"):
            read_curve(broken)
        (tmp_path / "text.safetensors").write_text("nonsense")
