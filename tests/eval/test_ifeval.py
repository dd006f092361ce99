"""Rules in the system prompt, judged by the package's own checks."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import tiny

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import Answer, TaskOptions
from kvreclaim.eval import packages as packages_module
from kvreclaim.eval.ifeval import HEAD, IfevalTask, ifeval_task
from kvreclaim.eval.text.prose import Encoder

TOKENIZER = tiny.tokenizer()
LLM = SimpleNamespace(tokenizer=TOKENIZER, loaded=SimpleNamespace(facts=SimpleNamespace(name="tiny")))


class Shout:
    """Stands for one of the package's rules."""

    def __init__(self, name):
        self.name = name

    def build_description(self):
        self.times = random.randint(1, 1000)
        return f"{self.name} {self.times} times."

    def get_instruction_args(self):
        return {"times": self.times}


RULES = SimpleNamespace(
    INSTRUCTION_DICT=dict.fromkeys(("a", "b", "c"), Shout),
    INSTRUCTION_CONFLICTS={"a": {"a", "b"}, "b": {"a", "b", "c"}, "c": {"b", "c"}},
    conflict_make=lambda conflicts: conflicts,
)


def test_rules_stand_first_and_do_not_contradict_each_other():
    task = IfevalTask(Encoder(TOKENIZER), RULES, 1500, 100)
    before = random.getstate()
    items = [task.item(seed, index) for seed in (0, 1) for index in (0, 1)]
    assert random.getstate() == before
    assert items[0] == task.item(0, 0)
    assert len({rule.text for item in items for rule in item.payload}) == 8
    for item in items:
        assert [rule.name for rule in item.payload] == ["a", "c"]
        assert 1500 - 60 < item.num_tokens <= 1500
        text, rules = TOKENIZER.decode(item.prompt), [rule.text for rule in item.payload]
        at = [text.index(part) for part in (HEAD.strip(), *rules, "an old diary. Now write about")]
        assert at == sorted(at)
        assert at[-1] > 0.8 * len(text)


def test_without_the_package_or_a_template_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(packages_module, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgumentError, match=r"ifeval needs .* if_verifiable.*'kvreclaim\[ifeval\]'"):
        ifeval_task(LLM, TaskOptions())
    monkeypatch.setattr(TOKENIZER, "chat_template", None)
    with pytest.raises(InvalidArgumentError, match="ifeval needs a chat template"):
        ifeval_task(LLM, TaskOptions())


@pytest.mark.filterwarnings("ignore")
def test_points_are_the_packages():
    pytest.importorskip("if_verifiable")
    task = ifeval_task(LLM, TaskOptions(num_tokens=3000))
    items = [task.item(0, index) for index in range(300)]
    names = {rule.name for item in items for rule in item.payload}
    assert len(names) > 15
    item = next(
        item
        for item in items
        if {rule.name for rule in item.payload} == {"punctuation:no_comma", "detectable_format:title"}
    )
    for text, points, rules in (
        ("<<Hills>> no", 1, 1),
        ("<<Hills>>, no", 0, 0.5),
        ("a, b", 0, 0),
        ("", 0, 0),
    ):
        score = task.judge(item, Answer(text=text))
        assert (score.points, score.extra) == (points, {"rules": rules})


def test_a_template_without_system_prompt_is_refused(monkeypatch):
    module = "if_verifiable.ifeval.instructions_registry"
    monkeypatch.setattr(
        "kvreclaim.eval.ifeval.task_package", lambda *names: RULES if names[0] == module else 1
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(InvalidArgumentError, match=r"needs a system prompt, .* refuses it .no system role."):
        ifeval_task(LLM, TaskOptions())
