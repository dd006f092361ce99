"""Tokens are drawn from the distribution that the parameters describe, and reported as the model saw it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreclaim.engine.sampling.logprobs import Logprob
from kvreclaim.engine.sampling.sampler import SIZES, SampleRow, _sample, completing, gumbel
from kvreclaim.ops.formats.hadamard import _splitmix64
from kvreclaim.sampling_params import SamplingParams

VOCAB = 12
DRAWS = 4000


def noise(seed: int, *size: int) -> torch.Tensor:
    return 2 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def row(
    params: SamplingParams | None = None,
    *,
    prompt: tuple[int, ...] = (0,),
    generated: tuple[int, ...] = (),
    forbidden: tuple[int, ...] = (),
    seed: int | None = 0,
) -> SampleRow:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return SampleRow(params or SamplingParams(), list(prompt), list(generated), forbidden, generator)


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> tuple[list[int], list[dict[int, Logprob] | None]]:
    """A token for each row of logits [N, V] fp32 (changed in place), and its log-probabilities, if any."""
    found = _sample(logits, rows, [row.key() for row in rows])
    return [one.token for one in found], [one.logprobs for one in found]


def draw(logits: torch.Tensor, one: SampleRow, count: int = DRAWS) -> Counter:
    """Counts of tokens over many draws from one distribution and one generator."""
    tokens, _ = sample(logits.expand(count, -1).clone(), [one] * count)
    return Counter(tokens)


def softmax(logits: list[float]) -> list[float]:
    best = max(logits)
    weights = [math.exp(x - best) for x in logits]
    total = sum(weights)
    return [w / total for w in weights]


def distribution(logits: torch.Tensor, p: SamplingParams) -> dict[int, float]:
    """The definition: temperature, then the k likeliest, then the fewest that reach top_p (of what is
    left), then those of at least min_p times the likeliest; what remains is scaled to 1."""
    probs = softmax([x / p.temperature for x in logits.tolist()])
    order = sorted(range(len(probs)), key=lambda t: -probs[t])
    order = order[: p.top_k] if p.top_k > 0 else order
    total = sum(probs[t] for t in order)
    kept, reached = [], 0.0
    for token in order:
        if kept and reached >= p.top_p:
            break
        kept.append(token)
        reached += probs[token] / total
    kept = [t for t in kept if probs[t] >= p.min_p * probs[order[0]]]
    total = sum(probs[t] for t in kept)
    return {t: probs[t] / total for t in kept}


def chi_square_limit(freedom: int) -> float:
    """A value that a true distribution exceeds once in about 30,000 (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_drawn_from(counts: Counter, probs: dict[int, float]) -> None:
    total = sum(counts.values())
    assert set(counts) <= set(probs)
    likely = [t for t in probs if probs[t] * total >= 5]
    assert set(likely) <= set(counts)
    if len(likely) > 1:
        chi_square = sum((counts[t] - total * probs[t]) ** 2 / (total * probs[t]) for t in likely)
        assert chi_square < chi_square_limit(len(likely) - 1)


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.4),
    SamplingParams(temperature=3.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=4),
    SamplingParams(top_k=-1),
    SamplingParams(top_k=99),
    SamplingParams(top_p=0.0),
    SamplingParams(top_p=0.05),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=0.95, temperature=2.0),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1.5, top_k=6, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=8, top_p=0.9, min_p=0.3),
]


def short(p: SamplingParams) -> str:
    return f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}"


@pytest.mark.parametrize("params", PARAMS, ids=short)
def test_many_draws_have_the_distribution_of_their_params(params: SamplingParams) -> None:
    logits = noise(1, VOCAB)
    assert_drawn_from(draw(logits, row(params)), distribution(logits, params))


def test_the_check_itself_rejects_another_temperature() -> None:
    logits = noise(1, VOCAB)
    counts = draw(logits, row(SamplingParams(temperature=1.0)), 2 * DRAWS)
    with pytest.raises(AssertionError):
        assert_drawn_from(counts, distribution(logits, SamplingParams(temperature=1.15)))


@given(
    st.integers(0, 10_000),
    st.floats(0.3, 3),
    st.integers(-1, VOCAB + 1),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
@settings(max_examples=100, deadline=None)
def test_no_token_outside_the_support_is_drawn(seed, temperature, top_k, top_p, min_p) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = noise(seed, VOCAB)
    drawn = set(draw(logits, row(params), 200))
    generous = {"top_p": min(1.0, top_p + 1e-5), "min_p": max(0.0, min_p - 1e-5)}
    params = SamplingParams(temperature=temperature, top_k=top_k, **generous)
    assert drawn <= set(distribution(logits, params))


def test_rows_of_one_batch_have_their_own_parameters() -> None:
    logits = noise(2, VOCAB)
    rows = [row(params, seed=i) for i, params in enumerate(PARAMS)]
    tokens, _ = sample(logits.expand(len(rows) * 500, -1).clone(), rows * 500)
    for i, params in enumerate(PARAMS):
        assert_drawn_from(Counter(tokens[i :: len(rows)]), distribution(logits, params))


def test_noise_is_that_of_splitmix64_by_key_and_token() -> None:
    keys = [0, 1, 2**63 - 1, 123_456_789_123]
    found = gumbel(torch.tensor(keys)[:, None], torch.arange(50).expand(4, -1))
    for key, own in zip(keys, found.tolist(), strict=True):
        uniform = [((word >> 12) + 0.5) / 2**52 for word in _splitmix64(key, 50)]
        assert own == pytest.approx([-math.log(-math.log(u)) for u in uniform], rel=1e-12)


@pytest.mark.parametrize("width", [0.1, 2.0, 6.0])
@pytest.mark.parametrize(
    "params", [SamplingParams(top_p=0.9), SamplingParams(top_k=300), SamplingParams(min_p=0.05)], ids=short
)
def test_however_many_tokens_are_looked_at_the_largest_of_those_kept_wins(
    params: SamplingParams, width: float
) -> None:
    """A vocabulary in which the likeliest few settle some rows, and all are sorted for others."""
    vocab = 2 * SIZES[-1]
    logits = width * noise(6, 6, vocab)
    keys = [row(params, seed=seed).key() for seed in range(6)]
    drawn = _sample(logits.clone(), [row(params)] * 6, keys)
    for line, key, one in zip(logits, keys, drawn, strict=True):
        kept = torch.tensor(sorted(distribution(line, params)))
        assert one.token == kept[(line[kept] + gumbel(key, kept)).argmax()]


def test_tokens_that_were_not_looked_at_come_as_often_as_they_should() -> None:
    """In this vocabulary the tokens behind the likeliest few have about half of the probability."""
    logits = noise(7, 8 * SIZES[0]) / 4
    chances = logits.softmax(-1)
    order = chances.argsort(descending=True).tolist()
    part = {token: place * 20 // len(order) for place, token in enumerate(order)}
    probs: dict[int, float] = Counter()
    for token, chance in enumerate(chances.tolist()):
        probs[part[token]] += chance
    counts = draw(logits, row(SamplingParams(temperature=1.0)))
    assert_drawn_from(Counter(part[token] for token in counts.elements()), probs)
    assert max(Counter(counts).values()) < 30


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = noise(3, 20, VOCAB)
    tokens, _ = sample(logits.clone(), [row(SamplingParams(temperature=0), seed=None)] * 20)
    assert tokens == [max(range(VOCAB), key=line.__getitem__) for line in logits.tolist()]


def test_greedy_and_drawn_rows_mix() -> None:
    logits = noise(3, 6, VOCAB)
    greedy = row(SamplingParams(temperature=0), seed=None)
    rows = [row(seed=1), greedy, row(SamplingParams(top_k=1), seed=2), greedy, row(seed=3), greedy]
    tokens, _ = sample(logits.clone(), rows)
    assert [tokens[i] for i in (1, 2, 3, 5)] == [int(logits[i].argmax()) for i in (1, 2, 3, 5)]


def test_a_seed_repeats_itself_whatever_else_is_in_the_batch() -> None:
    logits = noise(4, 3, 200)

    def tokens(order: list[int]) -> list[list[int]]:
        """Tokens by sequence over 10 steps; the others in the batch come and go."""
        rows = {i: row(SamplingParams(temperature=5.0, top_p=0.9), seed=i) for i in range(3)}
        out: dict[int, list[int]] = {i: [] for i in range(3)}
        for step in range(10):
            now = order if step % 2 else order[::-1]
            drawn, _ = sample(logits[now].clone(), [rows[i] for i in now])
            for i, token in zip(now, drawn, strict=True):
                out[i].append(token)
        return [out[i] for i in range(3)]

    together = tokens([0, 1, 2])
    assert together == tokens([0, 1, 2]) == tokens([2, 0, 1])
    assert together[1] == tokens([1])[1]
    assert len({tuple(x) for x in together}) == 3
    assert len(set(together[0])) > 5


def penalised(logits: list[float], one: SampleRow) -> list[float]:
    """vLLM's definition, a token at a time."""
    p, out = one.params, []
    for token, x in enumerate(logits):
        x += (p.logit_bias or {}).get(token, 0.0)
        if token in one.prompt or token in one.generated:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        count = one.generated.count(token)
        x -= p.frequency_penalty * count + (p.presence_penalty if count else 0.0)
        may_come = p.allowed_token_ids is None or token in p.allowed_token_ids
        out.append(x if may_come and token not in one.forbidden else -math.inf)
    return out


PENALTIES = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.1},
    {"presence_penalty": -1.1},
    {"frequency_penalty": 0.6},
    {"frequency_penalty": -0.6},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "allowed_token_ids": [11, 7, 5, 5, 1]},
    {"allowed_token_ids": [2]},
    {"repetition_penalty": 1.3, "logit_bias": {3: 1.5, 5: -3.0, 7: 100.0}},
]


@pytest.mark.parametrize("fields", PENALTIES, ids=str)
@pytest.mark.parametrize("generated", [(), (3,), (3, 5, 3, 3, 11)], ids=str)
def test_penalties(fields: dict, generated: tuple[int, ...]) -> None:
    logits = noise(5, VOCAB)
    one = row(SamplingParams(**fields), prompt=(1, 2, 2, 5), generated=generated, forbidden=(7,))
    want = torch.tensor(penalised(logits.tolist(), one))
    changed = logits[None].clone()
    sample(changed, [one])
    torch.testing.assert_close(changed[0], want)
    assert_drawn_from(draw(logits, one), {t: p for t, p in enumerate(softmax(want.tolist())) if p > 0})


def test_penalties_change_the_greedy_token_too() -> None:
    logits = torch.tensor([[3.0, 2.9, -1.0]] * 2)
    penalty = SamplingParams(temperature=0, presence_penalty=0.5)
    rows = [row(penalty, generated=(0,), seed=None), row(penalty, prompt=(0,), seed=None)]
    assert sample(logits, rows)[0] == [1, 0]


def test_tokens_that_are_not_allowed_do_not_come_whatever_else_is_in_the_batch() -> None:
    logits = noise(9, VOCAB)
    rows = [row(SamplingParams(temperature=0, allowed_token_ids=[token])) for token in range(VOCAB)]
    rows.insert(4, row(SamplingParams(temperature=0)))
    tokens, _ = sample(logits.expand(len(rows), -1).clone(), rows)
    assert tokens == [*range(4), int(logits.argmax()), *range(4, VOCAB)]


@pytest.mark.parametrize("drawn", [{"temperature": 0.0}, {}, {"top_k": 3, "min_p": 0.1}], ids=str)
def test_a_row_of_which_no_token_may_come_is_an_error_of_its_own(drawn: dict) -> None:
    dead = row(SamplingParams(allowed_token_ids=[3, 4], **drawn), forbidden=(3, 4))
    rows = [row(SamplingParams(temperature=0)), dead, row(SamplingParams(allowed_token_ids=[7]))]
    logits = noise(10, VOCAB)
    first, error, last = _sample(logits.expand(3, -1).clone(), rows, [one.key() for one in rows])
    assert (first.token, last.token) == (int(logits.argmax()), 7)
    assert isinstance(error, ValueError)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=6), st.data())
@settings(max_examples=200, deadline=None)
def test_a_token_that_would_complete_a_word_is_forbidden(words, data) -> None:
    """Compared with a search for each word in the text that each token would make."""
    generated = data.draw(st.lists(st.integers(0, 2), max_size=6))
    want = {token for token in range(3) for word in words if (*generated, token)[-len(word) :] == word}
    assert set(completing(words, generated)) == want


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB, VOCAB + 3, -1])
def test_logprobs_are_those_of_the_model(count: int) -> None:
    """The likeliest tokens and the drawn one, before temperature, penalties, biases and bans."""
    logits = noise(7, VOCAB)
    params = SamplingParams(
        logprobs=count, temperature=9.0, repetition_penalty=2.0, top_k=VOCAB - 3, logit_bias={4: 1.0}
    )
    drawn = set()
    for seed in range(20):
        tokens, reports = sample(
            logits[None].clone(), [row(params, seed=seed, prompt=(0, 1), forbidden=(2,))]
        )
        report = reports[0]
        want = torch.log_softmax(logits.double(), -1)
        order = want.argsort(descending=True).tolist()
        assert set(report) == {*(order if count < 0 else order[:count]), tokens[0]}
        for token, entry in report.items():
            assert entry.logprob == pytest.approx(float(want[token]), abs=1e-5)
            assert entry.rank == order.index(token) + 1
        drawn.add(tokens[0])
    assert len(drawn) > 3


def test_only_the_rows_that_ask_get_logprobs() -> None:
    rows = [row(), row(SamplingParams(logprobs=1)), row(SamplingParams(temperature=0))]
    reports = sample(noise(8, 3, VOCAB), rows)[1]
    assert [report is None for report in reports] == [True, False, True]
    assert sample(noise(8, 2, VOCAB), [row(), row()])[1] == [None, None]


def test_extreme_logits_stay_in_their_row() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-torch.inf, 0.0, -torch.inf], [-3e38, -3e38, 3e38]])
    tokens, _ = sample(logits, [row(SamplingParams(temperature=100.0))] * 3)
    assert tokens == [0, 1, 2]
