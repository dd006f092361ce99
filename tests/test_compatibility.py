"""The table of features that do not work together: every row is raised, and the docs print it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from kvreclaim.compatibility import TABLE, Feature, refuse
from kvreclaim.errors import InvalidArgumentError

NAMES = {feature: f"<{feature.name}>" for feature in Feature}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(f.name for f in row.features))
def test_a_row_refuses_its_features_and_nothing_less(row):
    on = {feature: NAMES[feature] for feature in row.features}
    with pytest.raises(InvalidArgumentError) as refusal:
        refuse(on)
    message = str(refusal.value)
    assert refusal.value.field == row.field
    assert message == row.message.format_map({f.name.lower(): NAMES[f] for f in row.features})
    assert message.endswith(".")
    assert not {"{", "}"} & set(message)
    for feature in row.features:
        refuse({other: text for other, text in on.items() if other is not feature})


def test_every_feature_is_in_a_row_and_no_row_is_there_twice():
    assert {feature for row in TABLE for feature in row.features} == set(Feature)
    assert len({frozenset(row.features) for row in TABLE}) == len(TABLE)


def test_the_page_is_the_table():
    script = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "docs.py"))
    assert script["COMPATIBILITY"].read_text() == script["compatibility_page"]()
