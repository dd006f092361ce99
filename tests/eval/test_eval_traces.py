"""The demo model's tasks as the evaluation sees them."""

from __future__ import annotations

import pytest
import tiny

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.eval.task import Answer
from kvreclaim.eval.traces import TraceTask, knows_demo_vocabulary
from kvreclaim.eval.vocabulary import TOKEN_IDS


@pytest.fixture(params=DEMO_TASKS)
def task(request):
    return TraceTask(request.param, 768)


def test_the_gold_trace_is_right_and_any_other_token_wrong(task):
    item = task.item(1, 2)
    example = item.payload
    assert item.num_tokens == len(example.document) <= 768
    kinds = DEMO_TASKS[task.name].judged
    judged = [i for i, kind in enumerate(example.kinds) if kind in kinds]
    assert judged

    gold = task.judge(item, Answer(predicted=example.trace))
    wrong = task.judge(item, Answer(predicted=tuple(token + 1 for token in example.trace)))
    assert (gold.points, gold.out_of) == (len(judged), len(judged))
    assert (wrong.points, wrong.out_of) == (0, len(judged))
    places = tuple(example.evidence[i] / len(example.document) for i in judged if example.evidence[i] >= 0)
    assert gold.found == wrong.lost == places
    assert gold.lost == wrong.found == ()


def test_one_wrong_token_is_one_verdict_at_its_evidence(task):
    item = task.item(0, 0)
    example = item.payload
    place = next(
        i
        for i, kind in enumerate(example.kinds)
        if kind in DEMO_TASKS[task.name].judged and example.evidence[i] >= 0
    )
    predicted = list(example.trace)
    predicted[place] += 1
    outcome = task.judge(item, Answer(predicted=tuple(predicted)))
    assert outcome.points == outcome.out_of - 1
    assert outcome.lost == (example.evidence[place] / len(example.document),)


def test_free_running_counts_up_to_the_first_error(task):
    item = task.item(0, 1)
    trace = list(item.payload.trace)
    assert task.judge_free(item, Answer(token_ids=tuple(trace))) == {"exact_match": 1.0, "progress": 1.0}
    trace[10] += 1
    found = task.judge_free(item, Answer(token_ids=tuple(trace)))
    assert found == {"exact_match": 0.0, "progress": 10 / len(trace)}


def test_seeds_and_numbers_draw_different_examples(task):
    items = {task.item(seed, index).prompt for seed in range(2) for index in range(3)}
    assert len(items) == 6
    assert task.item(1, 2).prompt in items


def test_a_size_that_a_task_cannot_have_is_refused():
    with pytest.raises(InvalidArgumentError, match="num_tokens is 100"):
        TraceTask("recall", 100)


def test_the_demo_vocabulary_is_known_by_its_words():
    assert knows_demo_vocabulary(TOKEN_IDS)
    assert not knows_demo_vocabulary({**TOKEN_IDS, "hello": 999})
    assert not knows_demo_vocabulary({word: i + 1 for word, i in TOKEN_IDS.items()})
    assert not knows_demo_vocabulary(tiny.tokenizer().get_vocab())
    assert not knows_demo_vocabulary({})
