"""Each demo task has one right trace, which a solver finds from the prompt alone, and names its places."""

import dataclasses
import random

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import vocabulary as v
from kvreclaim.eval.chain import next_carry
from kvreclaim.eval.demo_tasks import (
    DEMO_TASKS,
    MAX_TOKENS,
    MIN_TOKENS,
)
from kvreclaim.eval.example import Example, TokenKind, accuracy, scatter
from kvreclaim.eval.list_tasks import MultiQueryTask, RecallTask, VariableTrackingTask

SIZES = (MIN_TOKENS, 777, 2048, MAX_TOKENS)
COPIED = {TokenKind.KEY, TokenKind.ASKED, TokenKind.LOOKUP, TokenKind.RETURN, TokenKind.RESTORE}
OPENERS = {"recall": v.RECALL, "multi_query": v.QUERY, "variable_tracking": v.VARS}

all_tasks = pytest.mark.parametrize("name", DEMO_TASKS)
all_sizes = pytest.mark.parametrize("num_tokens", SIZES)


def pairs_of(prompt: tuple[int, ...]) -> dict[int, int]:
    """Read the facts of two tokens back."""
    return {prompt[i + 1]: prompt[i + 2] for i, token in enumerate(prompt) if token == v.FACT}


class Solver:
    """Writes the trace of a prompt, which is all it sees."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        go = len(prompt) - 1 - prompt[::-1].index(v.GO)
        self.num_filler = prompt[go + 1] - v.FIRST_LENGTH
        self.tail = prompt[go + 2 :]
        self.word = prompt[-2]
        openers = [i for i, token in enumerate(prompt) if token in OPENERS.values()]
        self.listed = prompt[openers[-1] + 1 : go] if openers else ()
        self.follower = v.filler_cycle()
        self.trace: list[int] = []

    def step(self, *tokens: int) -> None:
        words = v.filler_run(self.word, self.num_filler, self.follower)
        self.word = words[-1]
        self.trace += [*tokens, *words, v.STOP]

    def finish(self, *tokens: int) -> tuple[int, ...]:
        return (*self.trace, *tokens, v.EOS)

    def recall(self) -> tuple[int, ...]:
        facts, (node, carry) = pairs_of(self.prompt), self.tail[:2]
        carries = {}
        while node != v.END:
            key, node = node, facts[node]
            carries[node] = carry = next_carry(carry, node)
            self.step(v.FORWARD, key, node, carry)
        for node in self.listed:
            self.step(v.ASK_CARRY, node, carries[node])
        return self.finish()

    def multi_query(self) -> tuple[int, ...]:
        facts = pairs_of(self.prompt)
        for key in self.listed:
            self.step(v.ASK_VALUE, key, facts[key])
        return self.finish()

    def variable_tracking(self) -> tuple[int, ...]:
        facts = pairs_of(self.prompt)
        for value in self.listed:
            chain = [value]
            while chain[-1] != v.END:
                chain.append(facts[chain[-1]])
            self.step(v.LIST, *chain)
        return self.finish()


@all_sizes
@pytest.mark.parametrize("name", OPENERS)
@pytest.mark.parametrize("seed", range(8))
def test_a_solver_that_sees_only_the_prompt_writes_the_trace(name, num_tokens, seed):
    example = DEMO_TASKS[name].make(num_tokens).sample(seed)
    assert getattr(Solver(example.prompt), name)() == example.trace


@all_sizes
@all_tasks
def test_evidence_holds_the_token_and_stands_before_it(name, num_tokens):
    task = DEMO_TASKS[name].make(num_tokens)
    for seed in range(8):
        example = task.sample(seed)
        assert len(example.trace) == len(example.kinds) == len(example.evidence)
        for i, (token, kind, place) in enumerate(
            zip(example.trace, example.kinds, example.evidence, strict=True)
        ):
            assert (place >= 0) == (kind in COPIED)
            if kind in COPIED:
                assert place < len(example.prompt) + i
                assert example.document[place] == token


@all_tasks
def test_evidence_is_the_fact_or_the_step_that_decides(name):
    """Not just any equal token: the tokens before it decide, though random nodes stand among the filler."""
    task = DEMO_TASKS[name].make(1024)
    for seed in range(8):
        example = task.sample(seed)
        document, start = example.document, len(example.prompt)
        for i, kind in enumerate(example.kinds):
            place, here = example.evidence[i], start + i
            if kind is TokenKind.LOOKUP:
                assert document[place - 2 : place] == (v.FACT, document[here - 1])
            elif kind is TokenKind.RESTORE and place >= start:
                assert document[place - 3] == v.FORWARD
                assert (
                    document[place - 1] == document[here - 1]
                    or example.trace[i - 3] == document[here - 3] == v.BACKWARD
                )
            elif kind is TokenKind.ASKED:
                assert place < start


@all_sizes
@all_tasks
def test_documents_have_the_size_requested(name, num_tokens):
    task = DEMO_TASKS[name]
    for seed in range(8):
        example = task.make(num_tokens).sample(seed)
        assert num_tokens - 60 < len(example.document) <= num_tokens
        assert len(example.prompt) < num_tokens
        assert task.judged <= set(example.kinds)
        assert accuracy(example, example.trace, task.judged) == 1.0
        wrong = [
            v.UNK if kind in task.judged else t for t, kind in zip(example.trace, example.kinds, strict=True)
        ]
        assert accuracy(example, wrong, task.judged) == 0.0


@all_tasks
def test_same_seed_same_example_other_seed_another(name):
    task = DEMO_TASKS[name].make(600)
    assert task.sample(3) == DEMO_TASKS[name].make(600).sample(3) != task.sample(4)


@pytest.mark.parametrize("num_tokens", [MIN_TOKENS - 1, MAX_TOKENS + 1])
@all_tasks
def test_other_sizes_are_refused(name, num_tokens):
    with pytest.raises(InvalidArgumentError, match="num_tokens"):
        DEMO_TASKS[name].make(num_tokens)


def test_recall_asks_each_third_of_the_walk():
    task = DEMO_TASKS["recall"].make(2048)
    for seed in range(8):
        example = task.sample(seed)
        walk = [i for i, kind in enumerate(example.kinds) if kind is TokenKind.CARRY][
            :-1
        ]  # the last one is END
        queried = [e - len(example.prompt) for e, _ in evidence_of(example, TokenKind.RESTORE)]
        cuts = [len(walk) // 3, len(walk) * 2 // 3]
        thirds = [sum(walk.index(i) >= cut for cut in cuts) for i in queried]
        assert sorted(thirds) == sorted([0, 1, 2] * task.asked_per_zone)


def evidence_of(example: Example, kind: TokenKind) -> list[tuple[int, TokenKind]]:
    return [(e, k) for e, k in zip(example.evidence, example.kinds, strict=True) if k is kind]


def test_noise_makes_that_share_of_the_filler_nodes():
    clean, noisy = (
        dataclasses.replace(DEMO_TASKS["multi_query"].make(4096), noise=noise) for noise in (0.0, 0.25)
    )

    def nodes_among_filler(task: MultiQueryTask) -> float:
        prompt = task.sample(0).prompt
        body = prompt[: prompt.index(v.QUERY)]
        num_facts = 3 * task.num_facts
        nodes = sum(0 <= token - v.FIRST_NODE < v.NUM_NODES for token in body) - 2 * task.num_facts
        return nodes / (len(body) - num_facts)

    assert nodes_among_filler(clean) == 0
    assert nodes_among_filler(noisy) == pytest.approx(0.25, abs=0.08)


def test_scatter_says_where_each_fact_went():

    facts = [(10 + i, 20 + i, 30 + i)[: 2 + i % 2] for i in range(6)]
    body = scatter(random.Random(1), facts, 100, v.filler_cycle(), 0.5)
    assert len(body.tokens) == 100
    for fact, start in zip(facts, body.starts, strict=True):
        assert body.tokens[start : start + 1 + len(fact)] == (v.FACT, *fact)


@pytest.mark.parametrize(
    ("build", "dials", "named"),
    [
        (RecallTask, {"num_tokens": 900, "num_facts": 9}, "num_facts"),
        (RecallTask, {"num_tokens": 900, "num_facts": 20, "asked_per_zone": 0}, "asked_per_zone"),
        (RecallTask, {"num_tokens": 900, "num_facts": 20, "num_decoys": 45}, "num_decoys"),
        (RecallTask, {"num_tokens": 300, "num_facts": 20}, "num_tokens"),
        (RecallTask, {"num_tokens": 900, "num_facts": 20, "noise": -0.1}, "noise"),
        (MultiQueryTask, {"num_tokens": 900, "num_facts": 65, "num_asked": 1}, "num_facts"),
        (MultiQueryTask, {"num_tokens": 900, "num_facts": 5, "num_asked": 6}, "num_asked"),
        (MultiQueryTask, {"num_tokens": 80, "num_facts": 9, "num_asked": 6}, "num_tokens"),
        (
            MultiQueryTask,
            {"num_tokens": 80, "num_facts": 9, "num_asked": 6, "filler_words": (0, 1)},
            "filler_words",
        ),
        (VariableTrackingTask, {"num_chains": 17, "num_asked": 2, "num_variables": (1, 2)}, "num_asked"),
        (VariableTrackingTask, {"num_chains": 2, "num_asked": 3, "num_variables": (1, 2)}, "num_asked"),
        (VariableTrackingTask, {"num_chains": 8, "num_asked": 2, "num_variables": (3, 9)}, "num_variables"),
        (VariableTrackingTask, {"num_chains": 16, "num_asked": 9, "num_variables": (3, 4)}, "num_tokens"),
    ],
)
def test_impossible_sizes_are_refused_by_name(build, dials, named):
    with pytest.raises(InvalidArgumentError, match=f"^{named} is"):
        build(**{"num_tokens": 200, **dials})
