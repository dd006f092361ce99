"""Sessions that are generated request by request, and BFCL's multi-turn cases."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field, replace
from itertools import repeat
from types import SimpleNamespace

import pytest
import tiny
from guess import SMALL

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import Answer, Item, TaskOptions, TaskScore, evaluate
from kvreclaim.eval import bfcl as bfcl_module
from kvreclaim.eval import packages as packages_module
from kvreclaim.eval.bfcl import BfclSession, BfclTask, parsed, steps_of
from kvreclaim.eval.bfcl_cases import load_cases
from kvreclaim.eval.task import PlainTask
from kvreclaim.eval.task_names import BFCL_CATEGORIES
from kvreclaim.eval.tasks import make_tasks
from kvreclaim.parsers.pieces import ToolCall

NUM_REQUESTS, NEW_TOKENS, NUM_SYSTEM = 4, 24, 40


@pytest.fixture(scope="module")
def llm(tiny_dir):
    return LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=400)


@dataclass
class Chain:
    """A chain of prompts: each is the one before with its answer and more."""

    llm: LLM
    tokens: list[int]
    texts: list[str] = field(default_factory=list)
    turns: list[dict[str, float]] = field(default_factory=list)

    @property
    def answer(self):
        return Answer(turns=tuple(self.turns), texts=tuple((text,) for text in self.texts))

    def request(self):
        return Item(tuple(self.tokens), max_new_tokens=NEW_TOKENS) if len(self.texts) < NUM_REQUESTS else None

    def take(self, text, num_prompt, num_cached):
        assert num_prompt == len(self.tokens)
        self.texts.append(text)
        self.turns.append({"prompt": num_prompt, "cached": num_cached})
        self.tokens += [*self.llm.tokenizer.encode(text), *tiny.prompts((9,), seed=num_prompt)[0]]


@dataclass(frozen=True)
class Chains(PlainTask):
    llm: LLM
    name = "chains"
    compares = True
    identity = {}  # noqa: RUF012

    def item(self, seed, index):
        (prompt,) = tiny.prompts((100 + index,), seed=index)
        return Item(tuple(prompt), max_new_tokens=200, num_system=NUM_SYSTEM, payload=index)

    def converse(self, item):
        return Chain(self.llm, list(item.prompt))

    def judge(self, item, answer):
        same = tuple(float(a == b) for a, b in zip(answer.texts, answer.full.texts, strict=True))
        cached = tuple(turn["cached"] / turn["prompt"] for turn in answer.turns)
        return TaskScore(sum(same), len(same), cached_by_turn=cached, agreement_by_turn=same)


def talked(llm, task, index, config):
    """The session by hand: its end, and the compactions of all requests."""
    llm.engine.reset_prefix_cache()
    chain, compactions = task.converse(task.item(0, index)), 0
    for _ in range(NUM_REQUESTS):
        (out,) = llm.generate(
            [list(chain.tokens)], SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS), config
        )
        compactions += out.metrics.compactions
        chain.take(out.outputs[0].text, len(chain.tokens), out.metrics.num_cached_tokens)
    return chain, compactions


def test_a_session_is_its_requests_one_after_another(llm):
    task = Chains(llm)
    report = evaluate(llm, ["knorm", "full"], [64], [task], **{**SMALL, "num_examples": 2})
    ours, full = report.rows
    config = CompressionConfig("knorm", 64, interval=16, sinks=2, recent=8).protecting(NUM_SYSTEM, 16)
    assert config.sinks == 16
    whole = [talked(llm, task, index, None)[0] for index in (0, 1)]
    compressed = [talked(llm, task, index, config) for index in (0, 1)]
    same = [
        [float(a == b) for a, b in zip(a.texts, b.texts, strict=True)]
        for a, (b, _) in zip(whole, compressed, strict=True)
    ]
    assert full.value == 1.0
    assert ours.value == sum(map(sum, same)) / (2 * NUM_REQUESTS) < 1
    assert ours.agreement_by_turn == [sum(turn) / 2 for turn in zip(*same, strict=True)]
    assert ours.compactions == sum(compactions for _, compactions in compressed) > 2
    for row, chains in ((full, whole), (ours, [chain for chain, _ in compressed])):
        shares = zip(*([t["cached"] / t["prompt"] for t in chain.turns] for chain in chains), strict=True)
        assert row.cached_by_turn == pytest.approx([sum(turn) / 2 for turn in shares])
        assert row.cached_by_turn[0] == 0.0 < row.cached_by_turn[1]
    assert full.tokens_per_s * full.elapsed_s == pytest.approx(2 * NUM_REQUESTS * NEW_TOKENS)


def tagged(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def written(call: ToolCall) -> str:
    return tagged(call.name, **json.loads(call.arguments))


class Counter:
    """Stands for a case: results are numbers of calls so far."""

    truth = (["a"], ["a"])

    def turn(self, number):
        return [{"role": "user", "content": f"turn {number}"}]

    def run(self, steps):
        number = sum(map(len, steps[:-1]))
        return [
            f"Error during execution {number + at}" if call.name == "bad" else f"{number + at}"
            for at, call in enumerate(steps[-1])
        ]


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(bfcl_module, "most_steps", lambda: 2)
    task = SimpleNamespace(
        prompt=lambda case, messages, turn: (turn,) * len(messages), num_tokens=19, max_new_tokens=10
    )
    return BfclSession(task, Counter())


def answered(session, *texts):
    """The next request's prompt after each of these answers."""
    prompts = [session.request().prompt]
    for text in texts:
        session.take(text, 10, 4)
        request = session.request()
        prompts.append(None if request is None else request.prompt)
    return prompts


def test_a_turn_goes_on_until_an_answer_without_call(session):
    prompts = answered(session, f"Wait.{tagged('a', x=1)}{tagged('bad')}", "Done.", tagged("a"), "Over.")
    assert prompts == [(0,), (0,) * 4, (1,) * 6, (1,) * 8, None]
    a, bad = ToolCall("a", '{"x": 1}'), ToolCall("bad", "{}")
    assert [steps_of(texts) for texts in session.answer.texts] == [[(a, bad)], [(ToolCall("a", "{}"),)]]
    first, second = session.answer.turns
    assert first == {"prompt": 20, "cached": 8, "calls": 2, "accepted": 1, "done": 1}
    assert second == {"prompt": 20, "cached": 8, "calls": 1, "accepted": 1, "done": 1}
    assert [m["role"] for m in session.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    called = session.messages[1]
    assert called["content"] == "Wait."
    assert called["tool_calls"][0]["function"] == {"name": "a", "arguments": {"x": 1}}
    assert [m["content"] for m in session.messages if m["role"] == "tool"] == [
        "0",
        "Error during execution 1",
        "2",
    ]


def test_calls_in_fences_count():
    call = ToolCall("a", '{"x": {}}')
    fenced = '```json\n{\n "name": "a",\n "arguments": {"x": {}}\n}\n```'
    assert parsed(f"So:\n{fenced}\n{fenced}") == ("So:", (call, call))
    other = '```json\n{"x": {"name": "a"}}\n```'
    assert parsed(other) == (other, ())


def test_a_session_ends_at_the_limit_of_steps_or_of_tokens(session):
    assert answered(session, *[tagged("a")] * 3)[-1] is None
    assert session.answer.turns[0]["done"] == 0
    longer = BfclSession(session.task, Counter())
    assert answered(longer, tagged("a") * 7, "Done.")[1:] == [(0,) * 9, None]
    assert len(longer.answer.turns) == len(longer.answer.texts) == 1  # the second turn was never requested


@pytest.mark.parametrize(
    ("name", "template", "package", "message"),
    [
        (
            "bfcl:all",
            "<tool_call>",
            True,
            "'bfcl:all' is unknown; .* bfcl:base or bfcl:miss_func or bfcl:miss_param or bfcl:long_context",
        ),
        ("bfcl", "{{ tools }}", True, "bfcl needs a chat template that writes tool calls as Hermes"),
        ("bfcl", None, True, "bfcl needs a chat template that writes tool calls as Hermes"),
        ("bfcl", "<tool_call>", False, r"needs the package bfcl_eval.*pip install 'kvreclaim\[bfcl\]'"),
    ],
)
def test_what_is_missing_is_one_sentence(llm, monkeypatch, name, template, package, message):
    monkeypatch.setattr(packages_module, "find_spec", lambda name: package or None)
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(InvalidArgumentError, match=message):
        make_tasks([name], llm, TaskOptions())


def call_of(text: str, case) -> ToolCall:
    """A right call of the package, which is Python, as a model would write it."""
    node = ast.parse(text, mode="eval").body
    doc = next(each for each in case.functions if each["name"] == node.func.id)
    given = dict(zip(doc["parameters"]["properties"], node.args, strict=False))
    given |= {each.arg: each.value for each in node.keywords}
    return ToolCall(node.func.id, json.dumps({name: ast.literal_eval(each) for name, each in given.items()}))


@pytest.mark.parametrize("category", BFCL_CATEGORIES)
def test_the_packages_own_answers_are_right(category):
    pytest.importorskip("bfcl_eval")
    for case in list(load_cases(category).values())[::20]:
        calls = [[[call_of(text, case)] for text in turn] for turn in case.truth]
        assert case.num_right(calls) == len(case.truth)
        called = [number for number, turn in enumerate(case.truth) if turn]
        assert case.num_right([turn if at < called[-1] else [] for at, turn in enumerate(calls)]) < len(calls)


def test_functions_are_offered_from_their_turn_on():
    pytest.importorskip("bfcl_eval")
    case = load_cases("miss_func")["multi_turn_miss_func_0"]
    names = [[tool["function"]["name"] for tool in case.tools(turn)] for turn in (2, 3)]
    assert names[1] == [*names[0], "sort"]
    assert "some more functions" in case.turn(3)[0]["content"]
    assert all(tool["function"]["parameters"]["type"] == "object" for tool in case.tools(0))


def test_nothing_but_functions_of_the_case_is_called(capsys):
    pytest.importorskip("bfcl_eval")
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

    case = load_cases("base")["multi_turn_base_0"]
    before = set(vars(multi_turn_utils))
    here, there = ToolCall("pwd", "{}"), ToolCall("cd", '{"folder": "document"}')
    first, second = case.run([[here]]), case.run([[there], [here]])
    assert second == [first[0].replace("workspace", "workspace/document")]
    for name, arguments in (("print", "{}"), ("cd", '{"folder=print(1), x": 1}'), ("print(1) or cd", "{}")):
        (result,) = case.run([[ToolCall(name, arguments)]])
        assert "no function" in result
    (refused,) = case.run([[ToolCall("cd", '{"folder": "print(1)"}')]])
    assert refused.startswith(bfcl_module.REFUSED)
    assert capsys.readouterr().out == ""
    assert set(vars(multi_turn_utils)) == before


def test_the_verdict_on_a_session():
    pytest.importorskip("bfcl_eval")
    case = load_cases("base")["multi_turn_base_0"]
    task = BfclTask(SimpleNamespace(), "base", 4096, 64, "bfcl")
    texts = tuple((*map(written, map(call_of, turn, repeat(case))), "Done.") for turn in case.truth)
    turns = tuple(
        {"prompt": 100.0, "cached": 25.0 * at, "calls": 2.0, "accepted": 1.0, "done": 1.0} for at in range(4)
    )
    item, full = Item((1,), payload="multi_turn_base_0"), Answer(texts=texts)
    score = task.judge(item, Answer(turns=turns, texts=texts, full=full))
    assert (score.points, score.out_of) == (1, 1)
    extra = {"turns": 1, "turns_right": 1, "calls": 8, "same_calls": 1, "valid_calls": 0.5, "cached": 0.5}
    assert score.extra == extra
    assert score.cached_by_turn == (0, 0.25, 0.5, 0.75)
    other = (*texts[0][:-1], "I am done.")
    cut = Answer(turns=(turns[0], {**turns[1], "done": 0.0}), texts=(other, texts[1][:1]), full=full)
    score = task.judge(item, cut)
    assert score.points == 0
    assert [score.extra[name] for name in ("turns", "turns_right", "same_calls")] == [0.25] * 3
    assert score.agreement_by_turn == (0, 0, 0, 0)
    silent = Answer(turns=({**turns[0], "calls": 0.0},), texts=(("What?",),))
    score = task.judge(item, replace(silent, full=silent))
    assert score.extra == {"turns": 0.25, "turns_right": 0, "calls": 0}
    assert score.agreement_by_turn == (1,)
