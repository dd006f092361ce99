"""KL divergence and top-1 agreement against a plain computation over whole rows, and those rows against
transformers."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from kvreclaim import LLM, CompressionConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import agreement
from kvreclaim.eval.agreement import Agreement, Divergence, FullRows, places
from kvreclaim.eval.intervals import bootstrap, ratio_interval, wilson
from kvreclaim.eval.passages import Passages
from kvreclaim.eval.plan import TaskOptions
from kvreclaim.eval.task import Answer
from kvreclaim.eval.tasks import make_tasks
from kvreclaim.eval.windows import RandomWindows, TextWindows

NUM_TOKENS = 240
COMPRESSED = CompressionConfig("knorm", budget=40, interval=16, sinks=2, recent=8)


@pytest.fixture(scope="module")
def llm(tiny_dir):
    return LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=200)


def all_rows(llm, item, config=None):
    """[T, V] log-probabilities of the continuation."""
    rows = torch.full((len(item.continuation), tiny.VOCAB_SIZE), torch.nan)

    def watch(first, new_rows):
        rows[first : first + len(new_rows)] = new_rows

    llm.score([list(item.prompt)], [list(item.continuation)], config, observers=[watch])
    return rows


def test_observers_get_the_distributions_that_transformers_computes(llm, tiny_dir):
    item = RandomWindows(tiny.VOCAB_SIZE, NUM_TOKENS).item(0, 0)
    oracle = tiny.load_oracle(tiny_dir("llama"))
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*item.prompt, *item.continuation]])).logits[0]
    wanted = torch.log_softmax(logits[len(item.prompt) - 1 : -1], -1)
    torch.testing.assert_close(all_rows(llm, item), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows_at_once", [None, 37])
def test_sums_are_those_of_whole_rows(llm, monkeypatch, rows_at_once):
    item = RandomWindows(tiny.VOCAB_SIZE, NUM_TOKENS).item(0, 1)
    if rows_at_once is not None:
        monkeypatch.setattr(agreement, "ROW_BYTES", rows_at_once * tiny.VOCAB_SIZE * 4)
    rows = FullRows(len(item.continuation), tiny.VOCAB_SIZE)
    watcher = Divergence(rows)
    prompt, given = list(item.prompt), list(item.continuation)
    llm.score([prompt], [given], observers=[rows])
    out = llm.score([prompt], [given], COMPRESSED, observers=[watcher])[0]
    assert out.metrics.compactions > 2

    stride = 1 if rows_at_once is None else 4
    full, ours = all_rows(llm, item)[::stride], all_rows(llm, item, COMPRESSED)[::stride]
    kl = torch.nn.functional.kl_div(ours.double(), full.double(), log_target=True, reduction="sum")
    sums = watcher.sums()
    assert sums["places"] == len(full)
    assert sums["kl"] == pytest.approx(float(kl), rel=1e-5)
    assert sums["agree"] == (full.argmax(-1) == ours.argmax(-1)).sum()
    assert 0 < sums["agree"] < len(full)


def test_the_full_cache_agrees_with_itself(llm):
    item = RandomWindows(tiny.VOCAB_SIZE, NUM_TOKENS).item(0, 2)
    rows = FullRows(len(item.continuation), tiny.VOCAB_SIZE)
    watcher = Divergence(rows)
    for observer in (rows, watcher):
        llm.score([list(item.prompt)], [list(item.continuation)], observers=[observer])
    assert watcher.sums() == {"kl": 0.0, "agree": len(item.continuation), "places": len(item.continuation)}


@pytest.mark.parametrize(
    ("first", "count", "stride"), [(0, 10, 1), (3, 10, 4), (5, 2, 4), (8, 1, 8), (9, 6, 8)]
)
def test_places_are_the_multiples_in_a_range(first, count, stride):
    assert list(places(first, count, stride)) == [p for p in range(first, first + count) if p % stride == 0]


def test_an_impossible_token_adds_nothing():
    rows = FullRows(1, 3)
    rows(0, torch.tensor([[0.5, 0.5, 0.0]]).log())
    watcher = Divergence(rows)
    watcher(0, torch.tensor([[0.25, 0.5, 0.25]]).log())
    assert watcher.sums()["kl"] == pytest.approx(0.5 * torch.tensor(2.0).log().item())


def test_the_verdict_is_a_share_of_places():
    task = Agreement(RandomWindows(10, 32), "agreement")
    outcome = task.judge(task.item(0, 0), Answer(compared={"kl": 8.0, "agree": 12.0, "places": 16.0}))
    assert (outcome.points, outcome.out_of, outcome.extra) == (12.0, 16.0, {"kl": 0.5})


def test_random_windows_differ_by_seed_and_number_only():
    windows = RandomWindows(300, 64)
    items = {windows.item(seed, index) for seed in range(2) for index in range(3)}
    assert len(items) == 6
    assert windows.item(1, 2) in items
    assert all(len(item.prompt) == len(item.continuation) == 32 for item in items)


def test_text_windows_are_the_text_in_pieces(llm, tmp_path):
    text = "then the stop opens. " * 40
    (tmp_path / "text.txt").write_text(text)
    windows = TextWindows(Passages.read(llm.tokenizer, tmp_path / "text.txt"), 100)
    count = windows.num_examples(1000)
    assert count == len(llm.tokenizer.encode(text)) // 100
    assert windows.num_examples(2) == 2
    items = [windows.item(0, index) for index in range(count)]
    joined = [token for item in items for token in (*item.prompt, *item.continuation)]
    assert text.startswith(llm.tokenizer.decode(joined))


def test_overlapping_windows_score_each_token_once_and_lie_evenly_over_the_text():
    windows = TextWindows(Passages(tuple(range(1000)), (7,)), 301, 50)
    count = windows.num_examples(10**6)
    items = [windows.item(0, index) for index in range(count)]
    assert count == 15
    assert sorted(token for item in items for token in item.continuation) == list(range(250, 1000))
    for item in items:
        tokens = (*item.prompt[1:], *item.continuation)
        assert item.prompt[0] == 7
        assert tokens == tuple(range(tokens[0], tokens[0] + 300))
        assert len(item.continuation) == 50
    assert [item.prompt[1] for item in items[:3]] == [0, 450, 200]


def test_a_text_too_short_or_missing_is_refused(llm, tmp_path):
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(InvalidArgumentError, match="less than one window of 100"):
        TextWindows(Passages.read(llm.tokenizer, tmp_path / "text.txt"), 100)
    with pytest.raises(InvalidArgumentError, match=r"none\.txt.*cannot be read"):
        Passages.read(llm.tokenizer, tmp_path / "none.txt")


def test_one_observer_for_each_prompt(llm):
    with pytest.raises(InvalidArgumentError, match="observers has 1 entries for 2 prompts"):
        llm.score([[1, 2], [3, 4]], [[5], [6]], observers=[None])


@pytest.mark.parametrize("task", ["agreement", "perplexity"])
def test_a_text_of_unknown_words_is_refused(tmp_path, tiny_dir, task):
    """Every token of such a text is the unknown one, and any policy agrees with the full cache on these."""
    llm = LLM(tiny_dir("llama"), device="cpu", num_blocks=40)
    tokenizer = llm.tokenizer
    tokenizer.unk_token = tokenizer.convert_ids_to_tokens(tokenizer.encode("x")[-1])
    (tmp_path / "text.txt").write_text("x" * 400)
    options = TaskOptions(num_tokens=100, text=tmp_path / "text.txt")
    with pytest.raises(InvalidArgumentError, match="does not know 100% of the words of the text"):
        make_tasks([task], llm, options)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_gives_the_published_bounds(successes, trials, low, high):
    # 81 of 263: Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    found = wilson(successes, trials)
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)
    assert found.method == "wilson"


def test_one_verdict_an_example_is_a_share_of_trials():
    points = np.array([1.0, 0.0, 1.0, 1.0])
    assert ratio_interval(points, np.ones(4)) == wilson(3, 4)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_all_right_or_all_wrong_is_not_certain(right):
    out_of = np.array([20.0, 30.0, 25.0])
    assert ratio_interval(right * out_of, out_of) == wilson(3 * right, 3)


def test_the_bootstrap_agrees_with_the_normal_approximation():
    rng = np.random.default_rng(1)
    out_of = np.full(400, 25.0)
    points = rng.binomial(25, rng.beta(4, 2, size=400)).astype(float)
    found = ratio_interval(points, out_of)
    shares = points / 25
    half = 1.96 * shares.std(ddof=1) / 20
    assert found is not None
    assert found.method == "bootstrap"
    assert found.low == pytest.approx(shares.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(shares.mean() + half, abs=0.1 * half)


def test_more_verdicts_of_the_same_examples_narrow_nothing():
    out_of = np.array([5.0, 7.0, 9.0, 6.0, 8.0, 5.0])
    points = np.array([5.0, 3.0, 9.0, 1.0, 4.0, 5.0])
    assert ratio_interval(points, out_of) == ratio_interval(10 * points, 10 * out_of)


def test_one_example_has_no_spread():
    assert bootstrap(lambda rows: rows.mean(-1), 1) is None
    assert ratio_interval(np.array([3.0]), np.array([7.0])) is None


def test_resamples_without_a_value_are_left_out():
    found = bootstrap(lambda rows: np.where(rows[:, 0] == 0, np.nan, 2.0), 2)
    assert (found.low, found.high) == (2.0, 2.0)
    assert bootstrap(lambda rows: np.full(len(rows), np.inf), 2) is None
