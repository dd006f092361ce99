"""The text tasks: prompts are solved here by reading them, independently of how they were written, and
the scorers accept those solutions and nothing else."""

from __future__ import annotations

import json
import random
import re

import pytest
import tiny

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.jsonl import JsonlTask, normalise, read_questions
from kvreclaim.eval.task import Answer
from kvreclaim.eval.text import prose
from kvreclaim.eval.text.base import TextTask
from kvreclaim.eval.text.codes import ZONES, TextMultiQuery, TextRecall
from kvreclaim.eval.text.prose import Encoder, spread
from kvreclaim.eval.text.variables import TextVariableTracking
from kvreclaim.eval.text.walk import TextRSQ, draw_graph

TOKENIZER = tiny.tokenizer()
ENCODE = Encoder(TOKENIZER)
NUM_TOKENS, NEW_TOKENS = 3000, 100
PARTS = (prose._SUBJECTS, prose._VERBS, prose._OBJECTS, prose._ENDINGS)
LONGEST_SENTENCE = (
    sum(max(len(part) for part in parts) + 1 for parts in PARTS) + 1
)  # tokens are bytes at most
TASKS = [make(ENCODE, NUM_TOKENS, NEW_TOKENS) for make in (TextRecall, TextMultiQuery, TextVariableTracking)]


def facts_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"The access code of (the \w+ \w+) is (\d+)\.", text))


def solve_recall(text: str) -> str:
    name = re.search(r"What is the access code of (.*?)\?", text).group(1)
    return facts_of(text)[name]


def solve_multi_query(text: str) -> str:
    names = re.search(r"access codes of these: (.*?)\?", text).group(1).split("; ")
    return "\n".join(f"{name}: {facts_of(text)[name]}" for name in names)


def solve_variables(text: str) -> str:
    wanted = re.search(r"have the value (\d+)", text).group(1)
    values: dict[str, str] = {}
    for name, right in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        values[name] = values.get(right, right)  # in the order of the text: names stand after their source
    return ", ".join(name for name, value in values.items() if value == wanted)


def solve_rsq(text: str, steps: int) -> str:
    """The walk by recursion, not by a stack."""
    graph = {int(a): list(map(int, b.split(", "))) for a, b in re.findall(r"^(\d+): ([\d, ]+)$", text, re.M)}
    start = int(re.search(r"start at node (\d+)", text).group(1))
    states = [((start,), (start,))]

    def visit(path: tuple[int, ...]) -> None:
        for node in sorted(graph[path[-1]]):
            if node not in states[-1][1]:
                states.append(((*path, node), (*states[-1][1], node)))
                visit((*path, node))
                states.append((path, states[-1][1]))

    visit((start,))
    stack, visited = states[steps]
    return f"FINAL current = {stack[-1]}, stack = {list(stack)}, visited = {list(visited)}"


SOLVERS = {"recall": solve_recall, "multi_query": solve_multi_query, "variable_tracking": solve_variables}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("index", range(4))
def test_a_reader_of_the_prompt_scores_fully_and_its_prompt_fits(task: TextTask, index):
    item = task.item(7, index)
    prompt = TOKENIZER.decode(list(item.prompt))
    longest = NUM_TOKENS - NEW_TOKENS
    assert longest - LONGEST_SENTENCE < len(item.prompt) <= longest
    assert prompt.startswith("user: ")
    assert prompt.endswith("assistant: ")
    solved = task.judge(item, Answer(text=SOLVERS[task.name](prompt)))
    assert solved.points == solved.out_of >= 1
    assert not solved.lost
    silent = task.judge(item, Answer(text="I do not know."))
    assert silent.points == 0
    assert silent.lost == solved.found
    assert task.item(7, index) == item
    assert task.item(8, index).prompt != item.prompt


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_evidence_is_where_the_fact_stands(task: TextTask):
    item = task.item(3, 1)
    text = item.payload.text
    for answer, place in zip(item.payload.answer, item.payload.evidence, strict=True):
        start = round(place * len(text))
        assert answer in text[start : start + 60]
    found = task.judge(item, Answer(text=SOLVERS[task.name](text))).found
    share = len(item.prompt) / item.num_tokens
    assert found == pytest.approx([place * share for place in item.payload.evidence])


def test_recall_asks_at_the_start_the_middle_and_the_end_by_turns():
    for index in range(6):
        (place,) = TASKS[0].item(0, index).payload.evidence
        low, high = ZONES[index % 3]
        assert low - 0.05 <= place <= high + 0.05


def test_recall_takes_the_first_number_not_any():
    item = TASKS[0].item(0, 0)
    facts = facts_of(item.payload.text)
    right = item.payload.answer[0]
    wrong = next(code for code in facts.values() if code != right)
    assert TASKS[0].judge(item, Answer(text=f"It is {right}, not {wrong}.")).points == 1
    assert TASKS[0].judge(item, Answer(text=f"{wrong} or {right}")).points == 0
    assert TASKS[0].judge(item, Answer(text=f"<think>{wrong}?</think>{right}")).points == 1


def test_parts_are_counted_one_by_one():
    item = TASKS[1].item(0, 0)
    half = item.payload.answer[:2]
    outcome = TASKS[1].judge(item, Answer(text=" ".join(half)))
    assert (outcome.points, outcome.out_of) == (2, 4)
    assert len(outcome.found) == len(outcome.lost) == 2


@pytest.mark.parametrize("steps", [1, 4, 8, 12, 20])
@pytest.mark.parametrize("index", range(3))
def test_the_walk_is_that_of_a_recursion(steps, index):
    task = TextRSQ(ENCODE, NUM_TOKENS, NEW_TOKENS, steps=steps)
    item = task.item(1, index)
    solution = solve_rsq(item.payload.text, steps)
    outcome = task.judge(item, Answer(text=solution))
    assert (outcome.points, outcome.out_of) == (1, 1)
    assert outcome.extra == {"parsed": 1.0, "current": 1.0, "visited": 1.0}


def test_the_last_stack_counts_and_no_stack_is_wrong():
    task = TextRSQ(ENCODE, NUM_TOKENS, NEW_TOKENS, steps=8)
    item = task.item(1, 0)
    right = solve_rsq(item.payload.text, 8)
    early = "FINAL current = 1, stack = [1], visited = [1]"

    def points(text):
        return task.judge(item, Answer(text=text)).points

    assert points(f"{early}\n{right}") == 1
    assert points(f"{right}\n{early}") == 0
    assert points(right.replace("stack = [", "stack: [ ")) == 1
    assert points("The walk ends at node 3.") == 0
    assert task.judge(item, Answer(text="")).extra["parsed"] == 0


@pytest.mark.parametrize("num_nodes", [3, 5, 13])
def test_graphs_are_connected_and_undirected(num_nodes):
    graph = draw_graph(random.Random(num_nodes), num_nodes)
    assert set(graph) == set(range(1, num_nodes + 1))
    assert all(node in graph[other] for node, others in graph.items() for other in others)
    reached, ahead = set(), [1]
    while ahead:
        node = ahead.pop()
        reached.add(node)
        ahead += [other for other in graph[node] if other not in reached]
    assert reached == set(graph)


def test_facts_stand_in_the_order_of_their_depths():
    text, places = spread(random.Random(0), ["ONE.", "TWO.", "THREE."], [0.9, 0.1, 0.5], 40)
    assert text.index("TWO.") < text.index("THREE.") < text.index("ONE.")
    assert [round(place * (len(text) + 1)) for place in places] == [
        text.index(fact) for fact in ("ONE.", "TWO.", "THREE.")
    ]


def test_a_prompt_that_cannot_fit_is_refused():
    with pytest.raises(InvalidArgumentError, match="raise the number of tokens"):
        TextRecall(ENCODE, 300, 100).item(0, 0)


def test_without_a_template_the_text_is_the_prompt():
    plain = tiny.tokenizer()
    plain.chat_template = None
    assert Encoder(plain)("some text") == tuple(plain.encode("some text"))


def jsonl(tmp_path, *lines: str):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("answer", "contained", "exact"),
    [
        ("The answer is Paris.", 1, 0),
        ("paris!", 1, 1),
        ("the  PARIS", 1, 1),
        ("Parisian", 0, 0),
        ("city of light", 1, 1),
        ("London", 0, 0),
        ("", 0, 0),
    ],
)
def test_own_questions_are_compared_after_normalisation(tmp_path, answer, contained, exact):
    path = jsonl(tmp_path, '{"prompt": "Capital of France?", "answer": ["Paris", "The City of Light"]}')
    for wanted, points in ((False, contained), (True, exact)):
        task = JsonlTask("q", ENCODE, read_questions(path), 16, exact=wanted)
        item = task.item(0, 0)
        assert task.judge(item, Answer(text=answer)).points == points
        assert item.prompt == ENCODE("Capital of France?")


@pytest.mark.parametrize(
    ("answer", "contained", "exact"),
    [("A", 1, 1), ("The answer is (A).", 1, 0), ("The answer is B", 0, 0), ("an apple", 0, 0), ("", 0, 0)],
)
def test_an_answer_may_be_nothing_but_an_article(tmp_path, answer, contained, exact):
    path = jsonl(tmp_path, '{"prompt": "A or B?", "answer": "A"}')
    for wanted, points in ((False, contained), (True, exact)):
        task = JsonlTask("q", ENCODE, read_questions(path), 16, exact=wanted)
        assert task.judge(task.item(0, 0), Answer(text=answer)).points == points


def test_only_a_line_feed_ends_a_question(tmp_path):
    path = tmp_path / "questions.jsonl"
    text = '{"prompt": "one\u2028two\x85three", "answer": "x"}\r\n{"prompt": "2", "answer": "y"}'
    path.write_bytes(text.encode("utf-8-sig"))
    assert read_questions(path) == (("one\u2028two\x85three", ("x",)), ("2", ("y",)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("  The Quick-Brown, a FOX! ", "quick brown fox"),
        ("“Bern”. «Bern» ¡Bern! don’t", "bern bern bern don t"),
        ("答案：北京。", "答 案 北 京"),
        ("-5 it is", "-5 it is"),
        ("**−5** (-5) x=-5 –5 -.5 -$5", "-5 -5 x -5 -5 -0.5 -5"),
        ("3-5, 3–5, covid-19, f(3)-5, 2024-05-01, - 5", "3 5 3 5 covid 19 f 3 5 2024 05 01 5"),
        ("It is 3.5. Or .5? v1.2; 5.", "it is 3.5 or 0.5 v1.2 5"),
        ("the...5 1.Bern Bern.5", "5 1 bern bern 5"),
        ("-1,234.50 1,000,000 1,2,3 12,34", "-1234.50 1000000 1 2 3 12 34"),
        ("$5 €5 +5 5% ５．５", "5 5 5 5 5.5"),
    ],
)
def test_normalise(text, words):
    assert normalise(text) == words


@pytest.mark.parametrize(
    ("answer", "accepted", "right"),
    [
        ("答案是北京。", "北京", 1),
        ("The answer is “Bern”.", "Bern", 1),
        ("-5 it is", "5", 0),
        ("It is 5.", "-5", 0),
        ("2.5 grams", "5", 0),
        ("25 grams", "2.5", 0),
        ("It costs 1,000.", "1000", 1),
    ],
)
def test_punctuation_goes_and_numbers_keep_their_values(tmp_path, answer, accepted, right):
    path = jsonl(tmp_path, json.dumps({"prompt": "?", "answer": accepted}))
    task = JsonlTask("q", ENCODE, read_questions(path), 16)
    assert task.judge(task.item(0, 0), Answer(text=answer)).points == right


def test_a_directory_is_read_in_the_order_of_its_files(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "2", "answer": "y"}\n\n')
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "answer": "x", "source": "mine"}\n')
    (tmp_path / "c.txt").write_text("no questions")
    assert read_questions(tmp_path) == (("1", ("x",)), ("2", ("y",)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is no question"),
        ("[1]", "line 1 is no question"),
        ('{"prompt": "x"}', "line 1 is no question"),
        ('{"prompt": "", "answer": "x"}', "line 1 has prompt"),
        ('{"prompt": "x", "answer": 4}', "the answer text or"),
        ('{"prompt": "x", "answer": "..."}', "a letter or a digit"),
        ('{"prompt": "x", "answer": []}', "line 1 has prompt"),
        ("", "holds no questions"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    with pytest.raises(InvalidArgumentError, match=message):
        read_questions(jsonl(tmp_path, line))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"none\.jsonl.*cannot be read"):
        read_questions(tmp_path / "none.jsonl")
