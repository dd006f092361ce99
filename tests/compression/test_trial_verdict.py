"""The verdict of a trial follows from its table by the rule that is documented."""

from __future__ import annotations

from functools import partial

import pytest
from compression_oracles import model_facts, query_stats
from pydantic import ValidationError

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.spec.traits import footprint
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.trial import Trial, TrialOutcome, TrialScore
from kvreclaim.errors import InvalidArgumentError

FULL = TrialScore(once=2.0, once_right=0.5, again=0.5, again_right=0.9)


def outcome(policy: str, fraction: float, once: float, again: float) -> TrialOutcome:
    return TrialOutcome(
        policy=policy, fraction=fraction, budget=100, once=once, once_right=0, again=again, again_right=0
    )


def trial(*outcomes: TrialOutcome, full: TrialScore = FULL, questions: int = 0) -> Trial:
    return Trial(documents=2, tokens=500, questions=questions, full=full, outcomes=outcomes)


TABLE = (
    outcome("knorm", 0.2, 2.1, 0.6),
    outcome("knorm", 0.1, 2.5, 1.2),
    outcome("random", 0.2, 2.3, 0.4),
    outcome("random", 0.1, 2.2, 1.0),
)


def test_the_best_loses_least_going_on_and_in_repetition_over_all_budgets() -> None:
    found = trial(*TABLE)
    assert found.loss("knorm") == pytest.approx((0.1 + 0.1 + 0.5 + 0.7) / 2)
    assert found.loss("random") == pytest.approx((0.3 - 0.1 + 0.2 + 0.5) / 2)
    assert found.ranked == ("random", "knorm")
    assert found.best == "random"
    assert (found.policies, found.fractions) == (("knorm", "random"), (0.2, 0.1))


def test_what_a_model_cannot_read_back_with_all_of_its_cache_does_not_count() -> None:
    blind = FULL.model_copy(update={"again": 2.0})
    found = trial(*TABLE, full=blind)
    assert not found.reads_back
    assert found.loss("knorm") == pytest.approx((0.1 + 0.5) / 2)
    assert found.loss("random") == pytest.approx((0.3 + 0.2) / 2)
    assert trial(*TABLE).reads_back


def test_answers_replace_repetition_where_the_full_cache_gives_any() -> None:
    def answered(loss: float | None) -> dict[str, float | None]:
        return {"asked": loss, "asked_right": None if loss is None else 0.5}

    full = FULL.model_copy(update=answered(0.2))
    rows = [
        row.model_copy(update=answered(lost)) for row, lost in zip(TABLE, (0.3, 0.5, 1.2, 1.8), strict=True)
    ]
    found = trial(*rows, full=full, questions=3)
    assert found.loss("knorm") == pytest.approx((0.1 + 0.1 + 0.5 + 0.3) / 2)
    assert found.loss("random") == pytest.approx((0.3 + 1.0 + 0.2 + 1.6) / 2)
    assert found.best == "knorm"


def test_of_equals_the_first_that_was_tried_is_taken() -> None:
    rows = [outcome(policy, 0.2, 2.5, 0.5) for policy in ("tova", "h2o", "knorm")]
    assert trial(*rows).ranked == ("tova", "h2o", "knorm")


@pytest.mark.parametrize(
    "rows", [(), TABLE[:3], (*TABLE, TABLE[0]), (*TABLE[:3], TABLE[3].model_copy(update={"fraction": 0.3}))]
)
def test_every_policy_was_tried_once_at_every_fraction(rows) -> None:
    with pytest.raises(ValidationError):
        trial(*rows)


class TestResolving:
    """policy "auto" is what the statistics say."""

    def test_to_the_best_of_the_trial_and_all_else_stays(self) -> None:
        stats = query_stats(model_facts(2)).with_trial(trial(*TABLE))
        config = CompressionConfig("auto", budget=300, recent=20, stats=stats)
        assert config.resolved(stats, "it") == CompressionConfig("random", budget=300, recent=20, stats=stats)

    def test_a_named_policy_stays(self) -> None:
        config = CompressionConfig("knorm")
        assert config.resolved(None, "it") is config

    def test_without_a_trial_an_error_says_what_to_run(self) -> None:
        with pytest.raises(
            InvalidArgumentError, match=r"no statistics of the model; run `kvreclaim calibrate`"
        ):
            CompressionConfig().resolved(None, "the model")
        with pytest.raises(
            InvalidArgumentError, match=r"hold no trial of the model; run `kvreclaim calibrate`"
        ):
            CompressionConfig().resolved(query_stats(model_facts(2)), "the model")

    def test_unresolved_there_is_no_policy_to_ask(self) -> None:
        for ask in (
            CompressionConfig().make_policy,
            partial(CompressionConfig, "shares(auto)"),
            partial(footprint, "auto:budget=512"),
        ):
            with pytest.raises(InvalidArgumentError, match=r"policy auto stands .*calibrate --show FILE"):
                ask()


def test_a_trial_survives_its_file_and_may_be_absent(tmp_path) -> None:
    stats, path = query_stats(model_facts(2)), tmp_path / "stats.safetensors"
    stats.save(path)
    assert QueryStats.load(path).metadata.trial is None
    found = trial(*TABLE)
    stats.with_trial(found).save(path)
    assert QueryStats.load(path).metadata.trial == found
