"""A trial measures what serving would do, and its verdict is what `auto` becomes."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import tiny
import torch
from settings import assert_idle
from transformers import AutoModelForCausalLM

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.calibrate.calibration import held_out
from kvreclaim.calibrate.lookups import LookupDocument, Question
from kvreclaim.calibrate.trial import num_tokens, prose_document, try_candidates, window
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policy import LayerView
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.trial import FORMATS, SHARES, FormatOutcome, Trial
from kvreclaim.engine.api import kept_statistics
from kvreclaim.engine.api.llm import FOR_CALIBRATION
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError
from kvreclaim.kv_bytes import KV_BYTES
from kvreclaim.model_paths import STATS_FILE

DOCUMENTS = tiny.prompts((340, 400), seed=4)
PROSE = [prose_document(document) for document in DOCUMENTS]
CANDIDATES = ("streaming_llm", "query_mixture", "shares(surrogate)", "h2o", "shares(h2o)")


@pytest.fixture(scope="module")
def stats(calibrated_dir) -> QueryStats:
    return QueryStats.load(calibrated_dir("llama") / STATS_FILE)


@pytest.fixture(scope="module")
def model(tiny_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_dir("llama"), dtype=torch.float32)


@pytest.fixture(scope="module")
def lookup(model) -> LookupDocument:
    """Two questions that the full cache answers, and between them one that it does not."""
    prompt, *questions = tiny.prompts((330, 9, 5, 7), seed=6)
    answers = []
    for question in questions:
        read = [*prompt, *question]
        whole = model.generate(torch.tensor([read]), do_sample=False, max_new_tokens=6)
        answers.append(whole[0, len(read) :].tolist())
    answers[1] = answers[1][::-1]
    return LookupDocument("records", prompt, list(map(Question, ("records",) * 3, questions, answers)))


@pytest.fixture(scope="module")
def found(calibrated_dir, stats, lookup) -> Trial:
    llm = LLM(calibrated_dir("llama"), dtype="float32", device="cpu", num_blocks=8)
    return try_candidates(llm, stats, [*PROSE, lookup], candidates=CANDIDATES, formats=FORMATS)


def nats(model, context: list[int], tokens: list[int]) -> tuple[float, float]:
    """Mean negative log-likelihood of tokens behind a context, and the share that is the likeliest."""
    with torch.no_grad():
        rows = model(torch.tensor([context + tokens])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
    wanted = torch.tensor(tokens)
    lost = -rows.gather(1, wanted[:, None]).mean()
    return float(lost), float((rows.argmax(-1) == wanted).double().mean())


def check_prose(found: Trial, model) -> None:
    """The last eighth goes on; 32 of every 512 tokens of what stands before are scored again. The first token
    of both is read, not scored."""
    rows = []
    for document in DOCUMENTS:
        first = len(document) * 7 // 8
        prompt = document[: first + 1]
        again = document[1:32]
        repeated = nats(model, [*document[:first], document[0]], again)
        rows.append((*nats(model, prompt, document[first + 1 :]), *repeated))
    once, once_right, again, again_right = torch.tensor(rows).mean(0).tolist()
    assert found.full.once == pytest.approx(once, abs=1e-4)
    assert found.full.again == pytest.approx(again, abs=1e-4)
    assert (found.full.once_right, found.full.again_right) == pytest.approx((once_right, again_right))


def test_the_full_caches_row_is_what_transformers_says(found, model, lookup) -> None:
    """A question that the full cache does not answer is left out."""
    check_prose(found, model)
    answers = [nats(model, lookup.prompt + each.question, each.answer) for each in lookup.questions]
    assert [right >= 0.5 for _, right in answers] == [True, False, True]
    assert found.questions == 2
    assert found.full.asked == pytest.approx((answers[0][0] + answers[2][0]) / 2, abs=1e-4)
    assert found.full.asked_right == 1
    assert found.tokens == sum(len(document) * 7 // 8 for document in DOCUMENTS) + 330


def test_a_candidates_row_is_what_score_says_under_its_budget(found, stats, lookup, calibrated_dir) -> None:
    """Repetition is scored where there are no answers."""
    llm = LLM(calibrated_dir("llama"), dtype="float32", device="cpu", num_blocks=200)
    prose = try_candidates(llm, stats, PROSE, candidates=["query_mixture"], fractions=[0.2], formats=())
    (row,) = [row for row in found.outcomes if (row.policy, row.fraction) == ("query_mixture", 0.2)]
    budgets, lost = [], []
    for document in (*PROSE, lookup):
        budgets.append(int(len(document.prompt) * 0.2) // 16 * 16)
        recent = min(64, budgets[-1] // 4)
        config = CompressionConfig("query_mixture", budgets[-1], 128, 4, recent, stats=stats)
        for each in document.questions:
            continuation = [*each.question, *each.answer]
            (output,) = llm.score([document.prompt], [continuation], config)
            assert output.metrics.tokens_evicted > 0
            logprobs = output.logprobs[len(each.question) :]
            lost.append(-sum(logprobs) / len(logprobs))
    once, again, once2, again2, lookup1, _, lookup2 = lost
    assert row.budget == pytest.approx(sum(budgets) / 3)
    assert (row.once, row.asked) == pytest.approx(((once + once2) / 2, (lookup1 + lookup2) / 2), abs=1e-6)
    assert row.again is None
    (alone,) = prose.outcomes
    assert (alone.once, alone.again) == pytest.approx(((once + once2) / 2, (again + again2) / 2), abs=1e-6)
    assert alone.asked is None


def test_formats_are_compared_at_equal_bytes(found, stats, lookup, calibrated_dir) -> None:
    """With the settings of serving. Of 16 dims a token takes 128 bytes a head in fp32, 35 in int8 and 20 in
    int4; sinks and recent tokens, 132, leave at least 144."""
    assert {own.kv_cache_dtype for own in found.formats} == set(FORMATS)
    by = {(own.kv_cache_dtype, own.share): own for own in found.formats}
    documents = (*PROSE, lookup)
    for share in SHARES:
        for form, density in (("auto", 1), ("int8", 128 / 35), ("int4", 128 / 20)):
            tokens = [max(int(len(each.prompt) * share * density) // 16 * 16, 144) for each in documents]
            assert by[form, share].budget == pytest.approx(sum(tokens) / 3)
            llm = LLM(calibrated_dir("llama"), dtype="float32", device="cpu", kv_cache_dtype=form)
            config = CompressionConfig(found.best, share, stats=stats)
            assert tokens == [llm.compressors.promised(config, len(each.prompt)).budget for each in documents]
        losses = {form: found.lost(by[form, share]) for form in FORMATS}
        assert losses[found.format_at(share)] == min(losses.values())
    llm = LLM(calibrated_dir("llama"), dtype="float32", device="cpu", num_blocks=200).sibling(
        stats=stats, kv_cache_dtype="int8"
    )
    budget = int(len(lookup.prompt) * 0.2 * 128 / 35) // 16 * 16
    for config in (CompressionConfig(found.best, n, stats=stats) for n in (budget, "20%")):
        lost = []
        for each in (lookup.questions[0], lookup.questions[2]):
            read = {
                "prompt_token_ids": lookup.prompt + each.question,
                "compress_prompt_at": len(lookup.prompt),
            }
            (output,) = llm.score([read], [each.answer], config)
            assert output.metrics.budget == budget
            lost.append(-sum(output.logprobs) / len(output.logprobs))
        assert by["int8", 0.2].asked == pytest.approx(sum(lost) / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("share", "nearest"), [(0.01, 0.05), (0.05, 0.05), (0.07, 0.05), (0.072, 0.1), (0.15, 0.2), (0.9, 0.2)]
)
def test_a_share_takes_the_format_of_the_nearest_measured_one(found, share, nearest) -> None:
    worst = found.full.once + 9
    rows = [
        FormatOutcome(kv_cache_dtype=form, share=own, budget=16, once=worst - good, once_right=0, asked=1)
        for own, best in ((0.2, "auto"), (0.1, "int8"), (0.05, "int4"))
        for form in FORMATS
        for good in [form == best]
    ]
    trial = found.model_copy(update={"formats": tuple(rows)})
    assert trial.format_at(share) == {0.2: "auto", 0.1: "int8", 0.05: "int4"}[nearest]
    assert found.model_copy(update={"formats": ()}).format_at(share) is None


@pytest.fixture(scope="module")
def best_in_int4(found, stats) -> QueryStats:
    """Statistics in whose trial int4 loses least at every share."""
    rows = [
        own.model_copy(update={"once": 0.0 if own.kv_cache_dtype == "int4" else 9.0}) for own in found.formats
    ]
    return stats.with_trial(found.model_copy(update={"formats": tuple(rows)}))


def test_a_budget_in_bytes_chooses_the_format(best_in_int4, calibrated_dir) -> None:
    """Policy and KV cache dtype are left to choose; either that is named stays."""
    directory = calibrated_dir("llama")

    def form(policy: str, budget: object, **options: object) -> str:
        config = CompressionConfig(policy, budget, recent=16, stats=best_in_int4)
        llm = LLM(directory, dtype="float32", device="cpu", num_blocks=60, compression=config, **options)
        (output,) = llm.generate([DOCUMENTS[0]], SamplingParams(temperature=0.0, max_tokens=2))
        assert output.error is None
        density = {"fp32": 1, "int8": 128 / 35, "int4": 128 / 20}[llm.engine.kv_format.name]
        if budget != 64:
            assert output.metrics.budget == int(len(DOCUMENTS[0]) * 0.1 * density) // 16 * 16
        return llm.engine.kv_format.name

    assert form("auto", "10%") == "int4"
    assert form("auto", "10%", kv_cache_dtype="int8") == "int8"
    assert form("query_mixture", "10%") == "fp32"
    assert form("auto", 64) == "fp32"


@pytest.mark.parametrize(
    ("best", "share", "whole"),
    [
        ("int4", 1.0, "auto"),
        ("int4", 0.9, "int8"),
        ("int4", 0.45, "int8+int4"),
        ("int4", 0.3, "int4"),
        ("int4", 0.25, None),
        ("int8", 1.0, "auto"),
        ("int8", 0.52, "int8"),
        ("int8", 0.5, None),  # int8+int4 would fit, but it has lost more with more tokens
        ("auto", 0.9, None),
    ],
)
def test_where_a_full_cache_fits_the_format_is_the_widest(found, best, share, whole) -> None:
    rows = [own.model_copy(update={"once": 9.0 * (own.kv_cache_dtype != best)}) for own in found.formats]
    trial = found.model_copy(update={"formats": tuple(rows)})
    densities = {
        form: KV_BYTES["bf16" if form == "auto" else form].density(
            KV_BYTES["bf16"], [SimpleNamespace(num_kv_heads=1, key_dims=64, v_head_dim=64)]
        )
        for form in FORMATS
    }
    assert trial.format_at(share) == best
    assert trial.whole_format_at(share, densities) == whole


def test_the_log_names_the_share_that_was_measured(best_in_int4, calibrated_dir, caplog) -> None:
    logged = {}
    for budget in ("100%", "90%", "50%", "12%"):
        caplog.clear()
        config = CompressionConfig(budget=budget, recent=16, stats=best_in_int4)
        with caplog.at_level(logging.INFO):
            llm = LLM(
                calibrated_dir("llama"), dtype="float32", device="cpu", num_blocks=60, compression=config
            )
        (output,) = llm.generate([DOCUMENTS[0]], SamplingParams(temperature=0.0, max_tokens=2))
        assert (output.metrics.tokens_evicted > 0) == (budget == "12%")
        chosen = [line for line in caplog.messages if line.startswith("kv_cache_dtype is")]
        logged[llm.engine.kv_format.name] = chosen
    fits = "in which a full cache fits in {}% of its bytes in the model's dtype; name one to keep it"
    assert logged == {
        "fp32": [],
        "int8": [f"kv_cache_dtype is int8, {fits.format(50)}"],
        "int4": [
            "kv_cache_dtype is int4, which lost least in the trial at 10% of the bytes; name one to keep it"
        ],
    }


def test_statistics_without_a_trial_of_formats_keep_the_models_dtype(found, stats, make_llm, caplog) -> None:
    kept_statistics._warn_of_no_trial.cache_clear()
    tried = stats.with_trial(found.model_copy(update={"formats": ()}))
    llm = make_llm("llama", compression=CompressionConfig(budget="20%", stats=tried)).sibling()
    assert llm.engine.kv_format.name == "fp32"
    assert [line for line in caplog.messages if "kv_cache_dtype" in line] == [
        "kv_cache_dtype stays fp32: the statistics hold no trial of formats; run `kvreclaim calibrate` for "
        "this model, or name a format"
    ]


def test_a_share_below_what_is_always_kept_is_logged_once(make_llm, caplog) -> None:
    llm = make_llm("llama", compression=CompressionConfig("knorm", "10%"))
    params = SamplingParams(temperature=0.0, max_tokens=2)
    short, *long = tiny.prompts((140, 300, 400), seed=7)
    llm.generate([short], params)
    caplog.clear()  # the first request of a process may warn of the pool's size
    llm.generate([short], params)
    assert caplog.messages == []
    outputs = llm.generate(long, params)
    assert [output.metrics.budget for output in outputs] == [144, 144]
    assert caplog.messages == [
        "budget is 10%, 30 tokens of a prompt of 300, but 144 stay, as sinks and recent tokens are "
        "always kept; lower recent, or raise the budget"
    ]


def test_verify_keeps_the_models_dtype(best_in_int4, calibrated_dir) -> None:
    """The full cache verifies in the model's dtype, so the answer is that without compression."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    config = CompressionConfig(budget="20%", recent=16, verify=True, stats=best_in_int4)
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 60}
    full, drafting = (LLM(calibrated_dir("llama"), compression=each, **options) for each in (None, config))
    kept, verified = (llm.generate([DOCUMENTS[0]], params)[0] for llm in (full, drafting))
    assert verified.outputs[0].token_ids == kept.outputs[0].token_ids
    assert drafting.engine.kv_format.name == "fp32"


def test_what_the_model_cannot_have_is_left_out_and_reported(found) -> None:
    assert found.policies == ("streaming_llm", "query_mixture", "shares(surrogate)", "h2o")
    assert "shares" in found.refused["shares(h2o)"]
    assert all(math.isfinite(found.loss(policy)) for policy in found.policies)


def test_windows_have_tables_of_their_own_in_the_trial(calibrated_dir) -> None:
    """Unequal heads are tried where other layers have windows, as serving has them."""
    directory = calibrated_dir("gemma3")
    llm = LLM(directory, dtype="float32", device="cpu", **FOR_CALIBRATION)
    stats = QueryStats.load(directory / STATS_FILE)
    found = try_candidates(llm, stats, PROSE, candidates=("shares(surrogate)", "query_mixture"), formats=())
    assert found.policies == ("shares(surrogate)", "query_mixture")
    assert all(math.isfinite(found.loss(policy)) for policy in found.policies)


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1"])
def test_recurrent_layers_in_the_trial(family, calibrated_dir) -> None:
    """States go on behind what is compressed, and the best of the candidates is what `auto` becomes."""
    directory = calibrated_dir(family)
    llm = LLM(directory, dtype="float32", device="cpu", num_blocks=100)
    stats = QueryStats.load(directory / STATS_FILE)
    found = try_candidates(llm, stats, PROSE, candidates=("shares(surrogate)", "query_mixture"), formats=())
    check_prose(found, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    assert found.policies == ("shares(surrogate)", "query_mixture")
    assert all(math.isfinite(found.loss(policy)) for policy in found.policies)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    auto, named = (
        llm.generate([DOCUMENTS[0]], params, CompressionConfig(policy, 208, stats=stats.with_trial(found)))
        for policy in ("auto", found.best)
    )
    assert auto[0].outputs[0].token_ids == named[0].outputs[0].token_ids
    assert auto[0].metrics.tokens_evicted == named[0].metrics.tokens_evicted > 0


def test_the_same_documents_give_the_same_trial_and_no_block_is_lost(found, stats, lookup, make_llm) -> None:
    llm = make_llm("llama", num_blocks=8)
    again = try_candidates(llm, stats, [*PROSE, lookup], candidates=CANDIDATES, formats=FORMATS)
    assert again == found
    assert_idle(llm)


def test_a_candidate_that_fails_while_it_runs_is_left_out_whole(stats, make_llm, monkeypatch) -> None:
    calls = itertools.count()

    def failing(policy: Knorm, views: Sequence[LayerView]) -> list[torch.Tensor]:
        if next(calls) >= 4:
            raise RuntimeError("no more")
        return [view.keys.float().norm(dim=-1) for view in views]

    monkeypatch.setattr(Knorm, "score_many", failing)
    left = try_candidates(make_llm("llama"), stats, PROSE, candidates=["knorm", "streaming_llm"], formats=())
    assert left.policies == ("streaming_llm",)
    assert list(left.refused) == ["knorm"]
    with pytest.raises(InvalidArgumentError, match="no candidate could run: "):
        try_candidates(make_llm("llama"), stats, PROSE, candidates=["knorm"])


def test_documents_too_short_for_a_tenth_and_none_are_refused(stats, make_llm) -> None:
    with pytest.raises(InvalidArgumentError, match="documents of 320 tokens and more"):
        prose_document([5] * 319)
    with pytest.raises(InvalidArgumentError, match="pass one"):
        try_candidates(make_llm("llama"), stats, [])


def test_no_candidate_to_try_is_an_error(stats, make_llm) -> None:
    with pytest.raises(InvalidArgumentError, match="no candidate can run: policy shares keeps"):
        try_candidates(make_llm("llama"), stats, PROSE, candidates=["shares(h2o)"])


def test_the_longest_document_can_be_repeated(make_llm) -> None:
    llm = make_llm("llama")
    longest = prose_document([5] * window(llm.loaded.facts))
    follows = [len(each.question) + len(each.answer) for each in longest.questions]
    assert len(longest.prompt) + max(follows) <= llm.loaded.facts.max_position
    assert num_tokens(prose_document([5] * 2048), 3) == 1792 + 3 * (256 + 128)


def test_documents_are_held_out_evenly_among_those_that_are_long_enough() -> None:
    long, short = [[n] * 320 for n in range(9)], [[99] * 319]
    fit, tried = held_out([*long, *short], 2)
    assert [document[0] for document in tried] == [2, 6]
    assert [document[0] for document in fit] == [0, 1, 3, 4, 5, 7, 8, 99]
    assert [len(tried) for _, tried in (held_out(long, 4), held_out(long, 0), held_out(short, 4))] == [
        3,
        0,
        0,
    ]


class TestAuto:
    """The default of every face, from the file beside the weights or the one that is named."""

    @pytest.fixture
    def file(self, tmp_path, stats, found):
        path = tmp_path / "trial.safetensors"
        stats.with_trial(found).save(path)
        return path

    def test_is_the_trials_best_everywhere_behind(self, make_llm, file, found) -> None:
        config = CompressionConfig(budget=32, interval=16, sinks=2, recent=8, stats=file)
        llm = make_llm("llama", compression=config)
        assert llm.compression.policy == found.best
        assert llm.compressor(config).policy == llm.compressor(llm.compression).policy
        assert llm.compressor(config).config.policy == found.best
        greedy = SamplingParams(temperature=0, max_tokens=20)
        prompts = tiny.prompts((60,), seed=9)
        auto, named = (
            llm.generate(prompts, greedy, compression)[0].outputs[0].token_ids
            for compression in (None, CompressionConfig(found.best, 32, 16, 2, 8, stats=file))
        )
        assert auto == named

    @pytest.mark.parametrize(
        ("budget", "policy", "warned"), [(192, "auto", 1), (208, "auto", 0), (32, "knorm", 0)]
    )
    def test_a_small_budget_is_not_taken_silently(
        self, make_llm, file, caplog, budget: int, policy: str, warned: int
    ) -> None:
        llm = make_llm("llama")
        for _ in range(2):
            llm.compressor(CompressionConfig(policy, budget, 16, 2, 8, stats=file))
        warnings = [r.getMessage() for r in caplog.records if "forgets details" in r.getMessage()]
        text = f"budget is {budget} tokens a head; below about 200, policy auto forgets details; raise it"
        assert warnings == warned * [text]

    def test_without_a_trial_says_what_to_run(self, make_llm, tiny_dir) -> None:
        with pytest.raises(InvalidArgumentError, match=r"hold no trial of .*run `kvreclaim calibrate`"):
            make_llm("llama", compression=CompressionConfig())
        plain = LLM(tiny_dir("llama"), device="cpu", num_blocks=8)
        with pytest.raises(InvalidArgumentError, match=r"no statistics of .* --kv-compression-calibrate"):
            plain.generate([[5, 6]], compression=CompressionConfig())

    def test_of_another_model_is_refused(self, make_llm, file) -> None:
        with pytest.raises(StatsMismatchError, match="do not fit the model"):
            make_llm("qwen3", compression=CompressionConfig(stats=file))
