"""The chain task has one right answer that can be read from its prompt, and the scorers see each error."""

import dataclasses

import pytest
from transformers import AutoTokenizer

import kvreclaim
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import chain, vocabulary
from kvreclaim.eval import example as scores
from kvreclaim.eval.chain import ChainTask
from kvreclaim.eval.example import Example, TokenKind

ASSETS = kvreclaim.demo_model()

TASKS = (
    ChainTask(),
    ChainTask(num_prompt_tokens=60, num_trace_tokens=40, num_decoys=0),
    ChainTask(num_prompt_tokens=500, num_trace_tokens=300, filler_words=(1, 3), num_decoys=20),
    ChainTask(num_prompt_tokens=3000, num_trace_tokens=1000, filler_words=(15, 15), filler_seed=3, noise=0.4),
)


def facts_of(prompt: tuple[int, ...]) -> dict[int, int]:
    """Read the facts back from a prompt."""
    places = [i for i, token in enumerate(prompt) if token == vocabulary.FACT]
    facts = {prompt[i + 1]: prompt[i + 2] for i in places}
    assert len(facts) == len(places), "a key appears twice"
    assert len(set(facts.values())) == len(places), "a value appears twice"
    return facts


def hops_of(example: Example) -> list[tuple[int, ...]]:
    """Split the trace at its stops."""
    hops: list[tuple[int, ...]] = []
    hop: list[int] = []
    for token in example.trace[:-1]:
        hop.append(token)
        if token == vocabulary.STOP:
            hops.append(tuple(hop))
            hop = []
    assert not hop
    return hops


def test_vocabulary_has_265_distinct_words():
    assert len(set(vocabulary.TOKENS)) == len(vocabulary.TOKENS) == 265
    named = {"<pad>": vocabulary.PAD, "<eos>": vocabulary.EOS, "<unk>": vocabulary.UNK, "END": vocabulary.END}
    assert named.items() <= vocabulary.TOKEN_IDS.items()


def test_no_carry_can_be_inferred_from_its_successor():
    for column in zip(*chain.CARRY_TABLE, strict=True):
        assert len(column) == vocabulary.NUM_CARRIES
        assert all(column.count(carry) == 4 for carry in column)


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_example_other_seed_another(task):
    example = task.sample(5)
    assert example == task.sample(5)
    assert example != task.sample(6)


def test_an_example_is_pinned():
    example = ChainTask(num_prompt_tokens=40, num_trace_tokens=31, num_decoys=1).sample(0)
    trace = " ".join(vocabulary.TOKENS[i] for i in example.trace)
    out, back = (
        "# START END c2 fir grape moor iris holly cedar .",
        "< END START c15 heath moss stone aster coal bay .",
    )
    assert trace == f"{out} {back} <eos>"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seed", range(5))
def test_lengths_are_those_of_the_task(task, seed):
    example = task.sample(seed)
    assert len(example.prompt) == task.num_prompt_tokens
    assert len(example.kinds) == len(example.trace) <= task.num_trace_tokens
    num_filler = example.prompt[-5] - vocabulary.FIRST_LENGTH
    assert task.filler_words[0] <= num_filler <= task.filler_words[1]
    assert task.num_trace_tokens - len(example.trace) < 2 * (chain.HOP_TOKENS + num_filler)
    assert example.document == example.prompt + example.trace


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seed", range(5))
def test_the_trace_follows_from_the_prompt(task, seed):
    """Walk the facts with a solver that sees nothing but the prompt."""
    example = task.sample(seed)
    go, length, node, carry, word, stop = example.prompt[-chain.HEADER_TOKENS :]
    assert (go, node, stop) == (vocabulary.GO, vocabulary.START, vocabulary.STOP)
    facts = facts_of(example.prompt)
    hops, heads, undo = hops_of(example), [], []
    while node != vocabulary.END:
        value = facts.pop(node)
        undo.append((vocabulary.BACKWARD, value, node, carry))
        carry = chain.next_carry(carry, value)
        heads.append((vocabulary.FORWARD, node, value, carry))
        node = value
    assert [hop[:4] for hop in hops] == heads + undo[::-1]
    assert len(facts) == task.num_decoys
    follower = vocabulary.filler_cycle(task.filler_seed)
    for hop in hops:
        assert len(hop) == chain.HOP_TOKENS + length - vocabulary.FIRST_LENGTH
        for token in hop[4:-1]:
            assert token == follower[word]
            word = token
    assert example.trace[-1] == vocabulary.EOS


@pytest.mark.parametrize("task", TASKS)
def test_kinds_mark_what_they_say(task):
    example = task.sample(1)
    facts = facts_of(example.prompt)
    trace, kinds = example.trace, example.kinds
    forward = {}
    for i, kind in enumerate(kinds):
        if kind is TokenKind.LOOKUP:
            assert facts[trace[i - 1]] == trace[i]
        elif kind is TokenKind.RETURN:
            assert facts[trace[i]] == trace[i - 1]
        elif kind is TokenKind.CARRY:
            forward[trace[i - 1]] = trace[i]
        elif kind is TokenKind.RESTORE and trace[i - 1] != vocabulary.START:
            assert trace[i] == forward[trace[i - 1]]
        elif kind is TokenKind.RESTORE:
            assert trace[i] == example.prompt[-3]
    counts = {kind: kinds.count(kind) for kind in TokenKind}
    assert (
        counts[TokenKind.LOOKUP]
        == counts[TokenKind.CARRY]
        == counts[TokenKind.RETURN]
        == counts[TokenKind.RESTORE]
        > 0
    )
    assert (
        counts[TokenKind.FIRST]
        == counts[TokenKind.STOP]
        == counts[TokenKind.MARK] - 1
        == 2 * counts[TokenKind.LOOKUP]
    )


def test_other_filler_seed_changes_the_filler_and_nothing_else():
    plain, other = ChainTask().sample(2), ChainTask(filler_seed=1).sample(2)

    def without_filler(tokens: tuple[int, ...]) -> list[int]:
        last = vocabulary.FIRST_FILLER + len(vocabulary.FILLER_WORDS)
        return [token for token in tokens if not vocabulary.FIRST_FILLER <= token < last]

    assert plain.document != other.document
    assert without_filler(plain.document) == without_filler(other.document)


@pytest.mark.parametrize(
    ("dials", "named"),
    [
        ({"filler_words": (0, 4)}, "filler_words"),
        ({"filler_words": (5, 4)}, "filler_words"),
        ({"filler_words": (5, 16)}, "filler_words"),
        ({"num_decoys": -1}, "num_decoys"),
        ({"noise": 1.5}, "noise"),
        ({"num_trace_tokens": 30}, "num_trace_tokens"),
        ({"num_trace_tokens": 4000}, "num_trace_tokens"),
        ({"num_prompt_tokens": 100}, "num_prompt_tokens"),
    ],
)
def test_impossible_sizes_are_refused_by_name(dials, named):
    with pytest.raises(InvalidArgumentError, match=f"^{named}"):
        ChainTask(**dials)


def test_gold_scores_one():
    example = ChainTask().sample(3)
    assert scores.accuracy(example, example.trace, (TokenKind.LOOKUP, TokenKind.RESTORE)) == 1.0
    assert scores.progress(example, example.trace) == 1.0
    assert scores.progress(example, [*example.trace, vocabulary.PAD]) == 1.0
    assert scores.exact_match(example, [*example.trace, vocabulary.PAD])


@pytest.mark.parametrize("kind", [k for k in TokenKind if k is not TokenKind.ASKED])
def test_one_error_costs_its_own_kind_only(kind):
    example = ChainTask().sample(3)
    place = example.kinds.index(kind)
    predicted = list(example.trace)
    predicted[place] = vocabulary.UNK
    num = example.kinds.count(kind)
    assert scores.accuracy(example, predicted, (kind,)) == pytest.approx(1 - 1 / num)
    assert scores.accuracy(example, predicted, set(TokenKind) - {kind}) == 1.0
    assert scores.progress(example, predicted) == place / len(example.trace)
    assert not scores.exact_match(example, predicted)


def test_a_short_generation_is_unfinished_and_not_wrong():
    example = ChainTask().sample(3)
    assert scores.progress(example, example.trace[:100]) == 100 / len(example.trace)
    assert not scores.exact_match(example, example.trace[:-1])


def test_scores_of_nothing_are_refused():
    example = ChainTask().sample(3)
    with pytest.raises(InvalidArgumentError, match="give one for each"):
        scores.accuracy(example, example.trace[:-1], (TokenKind.LOOKUP,))
    empty = dataclasses.replace(example, trace=(vocabulary.EOS,), kinds=(TokenKind.MARK,), evidence=(-1,))
    with pytest.raises(InvalidArgumentError, match="lookup"):
        scores.accuracy(empty, (vocabulary.EOS,), (TokenKind.LOOKUP,))


def test_shipped_tokenizer_round_trips():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS, local_files_only=True)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == list(vocabulary.TOKENS)
    document = ChainTask().sample(0).document
    text = " ".join(vocabulary.TOKENS[token] for token in document)
    assert tokenizer.encode(text) == list(document)
    assert tokenizer.decode(document) == text
    node = vocabulary.FIRST_NODE
    assert tokenizer("# k1\n k2 .").input_ids == [vocabulary.FORWARD, node + 1, node + 2, vocabulary.STOP]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (vocabulary.EOS, vocabulary.PAD)
