"""A promised budget is the conformal quantile of what held-out documents needed."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from fractions import Fraction
from random import Random

import pytest
from compression_oracles import model_facts, query_stats
from curves import DENSITIES, cell, curve
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvreclaim.compression.conformal import conformal_quantile
from kvreclaim.compression.loss_curve import LossCell, LossCurve, read_curve
from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import InvalidArgumentError

BUDGETS = (160, 256, 512)
PLACES = {
    ("prose", 1024): {256: 0.05, 512: 0.01},
    ("lookups", 1024): {256: 0.2, 512: 0.02},
    ("prose", 2048): {256: 0.5, 1024: 0.03},
    ("lookups", 2048): {256: 0.03, 1024: 0.0},
}
TWO = curve("knorm", PLACES)


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
def cells(draw: st.DrawFn, content: str = "prose", length: int = 1024, form: str | None = None) -> LossCell:
    form = form or draw(st.sampled_from(["auto", "int8"]))
    budgets = BUDGETS if form == "auto" else (*BUDGETS, length)
    row = st.tuples(*[st.sampled_from([0.0, 0.01, 0.02, 0.1])] * len(budgets))
    losses = (draw(row),) * draw(st.sampled_from([18, 38])) + (draw(row),)  # of 39 one may lose more
    return LossCell(
        content=content,
        num_tokens=length,
        right=0.5,
        kv_cache_dtype=form,
        density=DENSITIES[form],
        budgets=budgets,
        losses=losses,
    )


def holding(cell: LossCell, most: float) -> dict[float, int]:
    """How many documents lose no more at this budget and at every larger one; math.inf: of none."""
    rows = [{**dict(zip(cell.budgets, row, strict=True)), math.inf: 0.0} for row in cell.losses]
    if cell.kv_cache_dtype == "auto":
        rows = [{**row, cell.num_tokens: 0.0} for row in rows]
    return {b: sum(all(row[c] <= most for c in row if c >= b) for row in rows) for b in sorted(rows[0])}


@given(cells(), st.sampled_from([0.0, 0.01, 0.05, 1.0]))
def test_a_budget_is_the_smallest_one_that_enough_documents_need_no_more_than(
    cell: LossCell, most: float
) -> None:
    """None: not even all tokens, where the rounding of a coded cache loses more."""
    held, count = holding(cell, most), len(cell.losses)
    enough = [b for b, holds in held.items() if Fraction(holds, count + 1) >= Fraction(95, 100)]
    assert cell.promised(most) == min(enough)
    for row in cell.losses:
        alone = holding(cell.model_copy(update={"losses": (row,)}), most)
        assert cell.need(row, most) == min(b for b, holds in alone.items() if holds)


@st.composite
def curves(draw: st.DrawFn) -> LossCurve:
    forms = ["auto", *draw(st.permutations(["int8", "int4", "fp16"]))]
    places = list(itertools.product(("prose", "lookups"), (640, 1024), forms))
    return LossCurve(policy="knorm", cells=tuple(draw(cells(*place)) for place in places))


@settings(max_examples=40)
@given(curves(), st.sampled_from([0.0, 0.01, 0.05]), st.sampled_from([None, "prose", "lookups"]))
def test_the_best_format_takes_the_fewest_bytes(curve: LossCurve, most: float, content: str | None) -> None:
    """By trying every budget of every format at every length."""
    fits: dict[str, float] = {}
    for form in curve.formats:
        shares = []
        for length in curve.lengths:
            own = [c for c in curve.cells if (c.num_tokens, c.kv_cache_dtype) == (length, form)]
            own = [c for c in own if content in (None, c.content)]
            sizes = [
                b
                for b in (*BUDGETS, length)
                if all(holding(c, most)[b] >= -(-(len(c.losses) + 1) * 95 // 100) for c in own)
            ]
            shares.append(min(sizes, default=math.inf) / length / DENSITIES[form])
            if sizes:
                continue
            with pytest.raises(InvalidArgumentError, match=f"values in {form} lose more even if every token"):
                curve.promised(form, most, 1, content)
        fits[form] = sum(shares) / len(shares)
    found, share = curve.best_format(most, content)
    assert share == pytest.approx(min(fits.values()))
    assert share <= 1
    equal = [form for form in curve.formats if math.isclose(fits[form], share)]
    assert found in equal
    assert DENSITIES[found] == min(DENSITIES[form] for form in equal)
    budgets = [curve.promised(found, most, length, content) or length for length in curve.lengths]
    taken = [b / n / DENSITIES[found] for b, n in zip(budgets, curve.lengths, strict=True)]
    assert sum(taken) / 2 == pytest.approx(share)


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
    assert TWO.promised("auto", max_loss, num_tokens, content) == budget


CODED = {
    ("prose", 1024): {256: 0.05, 512: 0.01, 1024: 0.0},
    ("lookups", 1024): {256: 0.3, 512: 0.06, 1024: 0.02},
    ("prose", 2048): {512: 0.05, 1024: 0.02, 2048: 0.02},
    ("lookups", 2048): {512: 0.04, 1024: 0.04, 2048: 0.03},
}
"""Losses of int8, beside TWO."""


def test_a_format_has_losses_and_budgets_of_its_own() -> None:
    both = curve("knorm", PLACES, {"int8": CODED})
    assert both.formats == ("auto", "int8")
    for loss, length, budget in (
        (0.06, 1024, 512),
        (0.04, 1024, None),
        (0.05, 2048, 512),
        (0.05, 2049, None),
    ):
        assert both.promised("int8", loss, length) == budget
        assert both.promised("auto", loss, length) == TWO.promised("auto", loss, length)
    assert both.promised("int8", 0.02, 100, "prose") == 512
    for loss, length in ((0.02, 100), (0.02, 9999)):  # at any length: the engine's format is for all of them
        with pytest.raises(
            InvalidArgumentError, match="keys and values in int8 lose more even if every token"
        ):
            both.promised("int8", loss, length)
    with pytest.raises(
        InvalidArgumentError, match=r"measured in auto, int8; .*--curve-formats auto,int8,int4"
    ):
        both.promised("int4", 0.1, 100)


@pytest.mark.parametrize("forms", [("int8", "int4"), ("int4", "int8")])
def test_of_equal_bytes_the_widest_is_best(forms) -> None:
    """256 tokens in int8 take those of 512 in int4."""
    budgets = {"int8": 256, "int4": 512}
    coded = {form: {("prose", 1024): {budgets[form]: 0.0, 1024: 0.0}} for form in forms}
    tied = curve("knorm", {("prose", 1024): {160: 0.1}}, coded)
    assert tied.best_format(0.0, None) == ("int8", 0.125)


def test_a_curve_without_formats_is_of_the_models_dtype() -> None:
    old = TWO.model_dump()
    for own in old["cells"]:
        del own["kv_cache_dtype"], own["density"]
    assert LossCurve.model_validate(old) == TWO


@pytest.mark.parametrize(
    ("share", "bound"), [(0.06, None), (0.0625, 0.2), (0.12, 0.2), (0.125, 0.1), (0.25, 0.03), (1.0, 0.03)]
)
def test_the_bound_within_a_share_of_the_bytes(share, bound) -> None:
    """It is that of the largest budget that fits."""
    own = cell("prose", 1024, {256: 0.2, 512: 0.1, 1024: 0.03}, "int4").model_copy(update={"density": 4.0})
    assert own.bound_within(share) == bound


def test_a_curve_is_whole() -> None:
    with pytest.raises(ValidationError, match="every content at every length"):
        LossCurve(policy="knorm", cells=TWO.cells[:3])
    with pytest.raises(ValidationError, match="the model's dtype among its formats"):
        LossCurve(policy="knorm", cells=(cell("prose", 512, {512: 0.1}, "int8"),))
    for losses, form in (({256: 0.1}, "int8"), ({256: 0.1, 1024: 0.0}, "auto")):
        with pytest.raises(ValidationError, match="all tokens are a budget, but not in the model's dtype"):
            cell("prose", 1024, losses, form)
    for losses in ({512: 0.1, 256: 0.1}, {512: 0.0, 1025: 0.0}):
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
