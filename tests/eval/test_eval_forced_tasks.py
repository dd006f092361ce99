"""Text tasks with given answers: questions, judged tokens, and the place of their evidence."""

from __future__ import annotations

import random

import pytest
from guess import SMALL

from kvreclaim import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import TaskOptions, evaluate
from kvreclaim.eval.passages import Passages
from kvreclaim.eval.task import Answer
from kvreclaim.eval.tasks import FORCED_TASKS, make_tasks
from kvreclaim.eval.traces import OwnTraces

NUM_TOKENS = 3000


@pytest.fixture(scope="module")
def llm(tiny_dir):
    return LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=200)


def make(llm, name, num_tokens=NUM_TOKENS):
    (task,) = make_tasks([name], llm, TaskOptions(num_tokens=num_tokens))
    return task


@pytest.fixture(
    params=[kind + known for kind in FORCED_TASKS for known in ("", ":known", ":chunks")], scope="module"
)
def task(request, llm):
    return make(llm, request.param)


def test_examples_have_the_requested_length_and_depend_on_seed_and_number_alone(task):
    items = {(seed, index): task.item(seed, index) for seed in range(2) for index in range(2)}
    assert len({item.prompt for item in items.values()}) == 4
    for place, item in items.items():
        assert item.num_tokens == NUM_TOKENS
        assert item == task.item(*place)


def test_facts_stand_where_the_evidence_says_and_the_judged_tokens_are_their_codes(llm, task):
    item = task.item(0, 3)
    quiz = task.write(random.Random(f"{task.kind}:0:3"))
    prompt = llm.tokenizer.decode(item.prompt)
    assert all(fact in prompt for fact in quiz.facts)
    questions = quiz.questions[:1] if task.has_one_question else quiz.questions
    assert prompt.endswith(questions[0][0]) == task.has_one_question
    text = llm.tokenizer.decode(item.continuation)
    judged = llm.tokenizer.decode([item.continuation[v.place] for v in item.payload])
    if task.has_one_question:
        assert text == questions[0][1]
        assert text.endswith(judged)
        assert len(item.payload) == len(item.continuation) - task.known
    else:
        assert text == "".join(head + answer for head, answer, _ in questions)
        assert judged == "".join(answer for _, answer, _ in questions)
    for head, answer, fact in questions:
        assert answer in quiz.facts[fact], head
    places = {round(v.evidence * NUM_TOKENS) for v in item.payload}
    starts = {len(llm.tokenizer.encode(prompt[: prompt.index(quiz.facts[fact])])) for _, _, fact in questions}
    assert all(min(abs(place - start) for start in starts) <= 3 for place in places)


def test_verdicts_are_those_of_the_judged_tokens(task):
    item = task.item(0, 0)
    given, judged = list(item.continuation), [v.place for v in item.payload]
    spoilt = [token if i in judged else token + 1 for i, token in enumerate(given)]
    spoilt[judged[0]] += 1
    logprobs = tuple(-2.0 if i in judged else -50.0 for i in range(len(given)))
    outcome = task.judge(item, Answer(tuple(spoilt), logprobs))
    assert (outcome.points, outcome.out_of) == (len(judged) - 1, len(judged))
    assert outcome.lost == (item.payload[0].evidence,)
    assert len(outcome.found) == len(judged) - 1
    assert outcome.extra == {"nll": 2.0}


def test_a_sequence_too_short_for_the_facts_is_refused(llm):
    with pytest.raises(InvalidArgumentError, match=r"task table needs \d+ tokens.*raise the number"):
        make(llm, "table", 200)


def test_windows_begin_at_evenly_spread_offsets():
    text = Passages(tuple(range(1000)), ())
    starts = sorted(text.window(number, 100)[0] for number in range(100))
    assert max(b - a for a, b in zip([0, *starts], [*starts, 900], strict=True)) < 30
    assert len(set(starts)) == 100
    with pytest.raises(InvalidArgumentError, match="1000 tokens, less than one window of 1001"):
        text.window(0, 1001)


def test_the_models_own_traces_are_continuations_that_the_full_cache_agrees_with(llm):
    tasks = ["agreement:own", "agreement:prose", "perplexity:code"]
    options = TaskOptions(num_tokens=200)
    report = evaluate(llm, ["full", "streaming_llm"], [0.3], tasks, options=options, **SMALL)
    assert [row.status for row in report.rows] == ["ok"] * 6
    assert report.row("full", "agreement:own").value == 1.0
    assert report.row("streaming_llm", "agreement:own").extra["kl"] > 0
    assert report.row("full", "perplexity:code").num_judged == 5 * 100
    passages = Passages.of(llm.tokenizer, "then the stop opens and the bells end. " * 40)
    items = [OwnTraces(llm, passages, 100).item(0, index) for index in (0, 1, 0)]
    assert items[0] == items[2] != items[1]
    assert [(len(item.prompt), len(item.continuation)) for item in items] == [(50, 50)] * 3


@pytest.mark.parametrize("kind", FORCED_TASKS)
def test_chunks_are_documents_with_whole_facts_behind_a_head(kind, llm):
    task = make(llm, f"{kind}:chunks")
    item = task.item(1, 2)
    quiz = task.write(random.Random(f"{kind}:1:2"))
    first, last = item.chunks[0][0], item.chunks[-1][1]
    assert llm.tokenizer.decode(item.prompt[:first]).endswith("\n\n")
    assert [a for a, _ in item.chunks[1:]] == [b for _, b in item.chunks[:-1]]
    texts = [llm.tokenizer.decode(item.prompt[a:b]) for a, b in item.chunks]
    assert len(texts) == 8
    assert all(sum(fact in text for text in texts) == 1 for fact in quiz.facts)
    assert llm.tokenizer.decode(item.prompt[last:]) == quiz.questions[0][0]
