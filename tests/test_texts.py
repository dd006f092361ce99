"""Calibration and evaluation texts share nothing."""

from __future__ import annotations

import pytest

from kvreclaim.corpora import Texts, code, prose, split


def paragraphs(text: str) -> list[str]:
    return [" ".join(p.split()) for p in text.split("\n\n")]


@pytest.mark.parametrize("texts", [prose, code])
def test_the_two_texts_share_no_paragraph_and_are_long(texts) -> None:
    found = texts()
    calibration, evaluation = map(paragraphs, found)
    assert not set(calibration) & set(evaluation)
    assert len(set(calibration)) == len(calibration)
    assert len(set(evaluation)) == len(evaluation)
    assert len(found.calibration) > len(found.evaluation) > 50_000
    assert found == texts()


def test_parts_stay_whole_and_a_paragraph_of_both_is_the_evaluations() -> None:
    assert split(["aa\n\nbb\n\n\nc", "dd\n\naa\n", "c\n\ne\n\ne"]) == Texts("aa\n\nbb\n\ndd", "c\n\ne")
