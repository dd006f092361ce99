"""The grid on real engines: figures against direct calls, what is refused or distrusted, and resuming."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from guess import POLICIES, SMALL, Guess

from kvreclaim import LLM, CompressionConfig, demo_model
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.cli.eval import _engine
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.trial import FormatOutcome, Trial, TrialOutcome, TrialScore
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import Answer, Item, TaskScore, evaluate
from kvreclaim.eval.journal import JOURNAL
from kvreclaim.eval.plan import EvalPlan, TaskOptions
from kvreclaim.eval.runner import BatchRunner, open_runners
from kvreclaim.eval.tables import task_table

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCK_BYTES = 2 * 2 * (16 + 16) * 4 * 16  # layers, KV heads, key and value dims, fp32, tokens


class Chatter(Guess):
    """Generates a hundred tokens and judges nothing."""

    def item(self, seed: int, index: int) -> Item:
        return Item(tuple(range(1, 40)), max_new_tokens=100)

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        return TaskScore(0, 1)


def direct(llm, policy: str, fraction: float) -> list[SimpleNamespace]:
    """The same cells by LLM.score, one example at a time."""
    found = []
    for seed in (0, 1):
        for index in range(5):
            item = Guess().item(seed, index)
            config = None
            if policy != "full":
                budget = int(fraction * item.num_tokens + 1e-9) // 16 * 16
                config = CompressionConfig(policy, budget, interval=16, sinks=2, recent=8)
            llm.engine.memory.reset_prefix_cache()
            (out,) = llm.score([list(item.prompt)], [list(item.continuation)], config)
            outcome = Guess().judge(item, Answer(tuple(out.predicted)))
            found.append(SimpleNamespace(item=item, outcome=outcome, metrics=out.metrics))
    return found


@pytest.mark.parametrize(
    ("policy", "fraction"), [("full", 1.0), ("knorm", 0.5), ("knorm", 0.3), ("segments(knorm)", 0.3)]
)
def test_figures_are_those_of_direct_calls(llm, report, policy, fraction):
    row, cells = report.row(policy, "guess", fraction), direct(llm, policy, fraction)
    right, judged = (sum(getattr(c.outcome, name) for c in cells) for name in ("points", "out_of"))
    assert row.status == "ok"
    assert row.accuracy == row.value == right / judged
    assert (row.num_examples, row.num_judged) == (10, judged)
    assert row.ci95[0] < row.value < row.ci95[1]
    assert row.blocks_freed == sum(c.metrics.blocks_freed for c in cells)
    assert row.tokens_evicted == sum(c.metrics.tokens_evicted for c in cells)
    assert row.kv_bytes_peak == BLOCK_BYTES * sum(c.metrics.peak_blocks for c in cells) / 10
    assert row.kv_bytes == BLOCK_BYTES * sum(c.metrics.answer_blocks for c in cells) / 10
    assert row.kv_bytes_budget == pytest.approx(fraction * 162 * BLOCK_BYTES / 16)
    assert sum(row.asked_at) == judged
    assert sum(row.lost_at) == judged - right
    assert row.speed_of == "scoring"
    assert row.tokens_per_s > 0
    by_seed = [sum(c.outcome.points for c in part) for part in (cells[:5], cells[5:])]
    assert [row.value_by_seed[s] for s in "01"] == pytest.approx([points / judged * 2 for points in by_seed])


def test_tokens_are_kept_like_the_share_that_comes_to_as_many(llm, report):
    arguments = (llm, POLICIES, [48], [Guess()])
    rows = evaluate(*arguments, seeds=[0, 1], **SMALL).rows
    other = {"fraction", "tokens", "kv_bytes_budget", "elapsed_s", "tokens_per_s"}
    shares = [row for row in report.rows if row.fraction in (1.0, 0.3)]
    assert [row.model_dump(exclude=other) for row in rows] == [
        row.model_dump(exclude=other) for row in shares
    ]
    assert [(row.fraction, row.tokens, row.keeps) for row in rows[:2]] == [
        (1.0, None, "100%"),
        (None, 48, "48 tokens"),
    ]
    assert rows[1].kv_bytes_budget == 3 * BLOCK_BYTES
    protected = evaluate(*arguments, protect_prompt=True, **SMALL).row("knorm", "guess", 48)
    assert protected.budget == 128  # whole blocks of 48 and a prompt of 80 to 82 tokens


def test_bytes_held_fall_to_the_budget(report):
    full, moved = (report.row(p, "guess", f) for p, f in zip(POLICIES[:2], (1.0, 0.3), strict=True))
    assert moved.kv_bytes < 0.6 * full.kv_bytes == 0.6 * full.kv_bytes_full
    assert moved.kv_bytes == 4 * BLOCK_BYTES  # 48 tokens and the interval of 16
    assert moved.kv_bytes_peak == 5.6 * BLOCK_BYTES  # prompts of 80, 80, 81, 81 and 82 tokens
    assert moved.reclaim_efficiency == 1.0
    assert full.of_full == 1.0
    assert moved.of_full == pytest.approx(moved.value / full.value)
    assert moved.of_full_ci95[0] < moved.of_full < moved.of_full_ci95[1]


def test_a_policy_that_never_compressed_is_an_error(llm):
    report = evaluate(llm, ["full", "knorm"], [1.0, 0.5], [Guess()], **SMALL)
    never = report.row("knorm", "guess", 1.0)
    assert never.status == "error"
    assert "no compression fired" in never.reason
    assert never.value is never.accuracy is None
    assert [row.status for row in report.rows] == ["ok", "error", "ok"]
    assert report.errors == [never]


def test_examples_too_short_for_a_compression_are_counted(llm):
    class Uneven(Guess):
        def item(self, seed: int, index: int) -> Item:
            return Guess(160 if index % 2 else 27).item(seed, index)

    (row,) = evaluate(llm, ["knorm"], [0.6], [Uneven()], **{**SMALL, "interval": 40}).rows
    assert (row.status, row.examples_compressed) == ("ok", 2)
    assert "compression fired in 2 of 5 examples" in row.reason


def test_what_cannot_run_is_refused_and_the_others_go_on(llm):
    settings = {**SMALL, "recent": 30}
    report = evaluate(llm, ["query_mixture", "knorm"], [0.5, 0.2, 0.05], [Guess()], **settings)
    reasons = {(row.policy, row.fraction): row.reason for row in report.rows if row.status == "refused"}
    assert "needs query statistics" in reasons["query_mixture", 0.5]
    assert "always kept" in reasons["knorm", 0.2]
    assert "less than one block" in reasons["knorm", 0.05]
    assert report.row("knorm", "guess", 0.5).status == "ok"
    assert report.errors == []


def test_a_preempted_sequence_makes_a_cell_an_error(model, monkeypatch):
    monkeypatch.setattr(BatchRunner, "batch_size", lambda self, task, items: len(items))
    crowded = LLM(model, dtype="float32", device="cpu", num_blocks=25)
    settings = {**SMALL, "batch_size": 5}
    (row,) = evaluate(crowded, ["full"], [0.5], [Chatter()], **settings).rows
    assert row.status == "error"
    assert "preemptions" in row.reason


@pytest.mark.parametrize("policy", ["full", "knorm", "snapkv", "h2o", "shares(knorm)", "oracle"])
def test_rows_are_the_same_with_and_without_cached_prompts(model, monkeypatch, policy):
    policies = list(dict.fromkeys(["knorm", policy]))
    found = {}
    for cached in (True, False):
        llm = LLM(model, dtype="float32", device="cpu", num_blocks=100, enable_prefix_caching=cached)
        row = evaluate(llm, policies, [0.5, 0.3], [Guess(400)], **SMALL).row(policy, "guess")
        hits = llm.engine.memory.stats().prefix_hit_tokens
        assert bool(hits) == cached
        found[cached] = row.model_dump(exclude={"tokens_per_s", "elapsed_s"})
    assert found[True] == found[False]
    assert found[True]["status"] == "ok"


def test_prompts_are_computed_once_for_all_settings(llm, monkeypatch):
    computed = []
    score = llm.score

    def watch(prompts, *rest, **more):
        outs = score(prompts, *rest, **more)
        computed.append([out.metrics.num_prompt_tokens - out.metrics.num_cached_tokens for out in outs])
        return outs

    monkeypatch.setattr(llm, "score", watch)
    evaluate(llm, ["full", "knorm", "snapkv(window=4)"], [0.5, 0.3], [Guess()], **SMALL | {"num_examples": 2})
    first, second = computed[:6], computed[6:]  # the first batch is one example alone
    assert (first[0], second[0]) == ([80], [80])
    assert len(first) == len(second) == 6
    assert all(tokens <= 16 for batch in (*first[1:], *second[1:]) for tokens in batch)


def test_a_small_pool_only_makes_batches_smaller(model, report):
    small = LLM(model, dtype="float32", device="cpu", num_blocks=12)
    again = evaluate(small, POLICIES, [0.5, 0.3], [Guess()], seeds=[0, 1], **SMALL)
    assert [row.value for row in again.rows] == [row.value for row in report.rows]
    assert [row.preemptions for row in again.rows] == [0] * 5


def test_auto_is_named_beside_what_the_statistics_name(tmp_path):
    llm = LLM(demo_model(), num_blocks=200)
    best = llm.resolved(CompressionConfig()).policy
    report = evaluate(llm, ["full", "auto", best], [0.25], ["chain"], num_examples=1, out=tmp_path)
    assert [row.policy for row in report.rows] == ["full", best]
    assert [row.is_auto for row in report.rows] == [False, True]
    assert report.rows[1].blocks_freed > 0
    shown = f"auto: {best}"
    assert [line[0] for line in task_table(report, "chain").lines] == ["full", shown]
    report.write_csv(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert [(row["policy"], row["is_auto"]) for row in csv.DictReader(file)] == [
            ("full", "False"),
            (best, "True"),
        ]


def test_auto_without_a_trial_is_one_sentence(llm):
    with pytest.raises(InvalidArgumentError, match="policy auto is what calibration finds best"):
        evaluate(llm, ["auto"], [0.5], [Guess()], **SMALL)


@pytest.fixture(scope="module")
def stats_files(llm, tmp_path_factory) -> list[Path]:
    """Statistics of two sets of documents, which give two key transforms."""
    directory = tmp_path_factory.mktemp("stats")
    files = [directory / f"{seed}.safetensors" for seed in (5, 6)]
    for seed, file in zip((5, 6), files, strict=True):
        calibrate(llm.loaded, tiny.prompts((150, 80), seed=seed), num_centers=4).save(file)
    return files


def test_keys_are_centred_by_the_plans_statistics(llm, stats_files, tmp_path):
    """The first format and the others centre keys like an engine whose compression names the file."""
    first, second = stats_files
    served = llm.sibling(stats=second, kv_cache_dtype="int4")
    for own in (llm.sibling(kv_cache_dtype="int4"), llm.sibling(stats=first, kv_cache_dtype="int4"), llm):
        assert own.engine.kv_format != served.engine.kv_format
        runners = open_runners(own, EvalPlan(kv_cache_dtypes=["int4", "int8", "fp32"], stats=second))
        assert runners["int4"].llm.engine.kv_format == served.engine.kv_format
        assert runners["int8"].llm.engine.kv_format.transform == served.engine.kv_format.transform != ""
        assert (runners["fp32"].llm is own) == (own is llm)
        settings = {**SMALL, "kv_cache_dtypes": ["int4"], "stats": second, "out": tmp_path}
        (row,) = evaluate(own, ["full"], [1.0], [Guess()], **settings).rows
        cells = [each.outcome for each in direct(served, "full", 1.0)[:5]]
        assert row.value == sum(each.points for each in cells) / sum(each.out_of for each in cells)
    evaluate(llm, ["full"], [1.0], [Guess()], **settings | {"stats": first})
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    formats = [line["about"]["kv_format"] for line in lines if "about" in line]
    assert formats == [
        each.engine.kv_format.fingerprint
        for each in (served, llm.sibling(stats=first, kv_cache_dtype="int4"))
    ]


def test_the_commands_engine_has_the_plans_key_transform(model, llm, stats_files):
    plan = EvalPlan(kv_cache_dtypes=["int4", "int8"], stats=str(stats_files[1]))
    made = _engine(model, plan, EngineConfig(), ["recall"], TaskOptions(num_tokens=64), dtype="float32")
    assert open_runners(made, plan)["int4"].llm is made
    assert made.sibling().engine.kv_format == made.engine.kv_format
    assert made.engine.kv_format.transform != ""


def test_auto_is_measured_in_the_format_that_would_be_served(model, llm, stats_files, tmp_path):
    """Each share has its own format, next to the full cache in the model's dtype; named formats are kept."""
    score = {"once": 1.0, "once_right": 0.5}
    forms = {("auto", 0.2): 2.0, ("int4", 0.2): 1.5, ("auto", 0.1): 2.0, ("int8", 0.1): 1.5}
    trial = Trial(
        documents=1,
        tokens=280,
        full=TrialScore(**score),
        outcomes=(TrialOutcome(policy="knorm", fraction=0.2, budget=48, **score),),
        formats=tuple(
            FormatOutcome(kv_cache_dtype=form, share=share, budget=48, **score | {"once": once})
            for (form, share), once in forms.items()
        ),
    )
    stats = QueryStats.load(stats_files[0]).with_trial(trial)
    arguments, settings = (llm, ["full", "auto"], [0.15, 0.08], [Guess()]), {**SMALL, "stats": stats}
    rows = evaluate(*arguments, **settings, out=tmp_path).rows
    shown = [(row.policy, row.kv_cache_dtype, row.fraction, row.status) for row in rows]
    assert shown == [
        ("full", "auto", 1.0, "ok"),
        ("knorm", "int4", 0.15, "ok"),
        ("knorm", "int8", 0.08, "ok"),
    ]
    named = evaluate(*arguments, **settings, kv_cache_dtypes=["fp32", "int4", "int8"]).rows
    timed = {"tokens_per_s", "elapsed_s", "is_auto"}
    by = {(row.policy, row.kv_cache_dtype, row.fraction): row for row in named}
    for row in rows[1:]:
        same = by[row.policy, row.kv_cache_dtype, row.fraction]
        assert row.model_dump(exclude=timed) == same.model_dump(exclude=timed)
        config = CompressionConfig(budget=row.fraction, recent=8, stats=stats)
        with LLM(model, dtype="float32", num_blocks=20, compression=config) as served:
            assert served.engine.kv_format.name == row.kv_cache_dtype
