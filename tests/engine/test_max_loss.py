"""A request with max_loss gets exactly the budget that the loss curve promises for its prompt."""

from __future__ import annotations

import logging
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import tiny
from curves import DENSITIES, curve
from settings import assert_idle

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.chunks import Chunks
from kvreclaim.compression.loss_curve import CONTINUED
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression_settings import CONTENTS
from kvreclaim.config import EngineConfig
from kvreclaim.engine.feature import take_options
from kvreclaim.engine.features import FEATURES
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model_paths import STATS_FILE
from kvreclaim.refusals.max_loss import ENGINE_MEASURED

ENGINE_CHECKED = frozenset({"kv_cache_dtype", "max_num_batched_tokens"})
"""Compared with the curve or the model itself (Compressors)."""
ENGINE_FREE = frozenset(
    {
        "block_size",  # budgets are rounded up to whole blocks
        "num_blocks",
        "max_num_seqs",
        "max_model_len",
        "disable_hybrid_kv_cache_manager",
        "enable_prefix_caching",
        "state_checkpoints",
        "state_checkpoint_interval",
        "state_drafts",
        "kv_memory_fraction",
        "memory_limit",
        "max_signal_bytes",
        "seed",
        "scheduling_policy",
        "eviction_policy",
        "prefix_snapshot_fraction",
        "max_pinned_fraction",
        "kernels",
        "threads",
        "cache_packed_weights",
        "kv_offloading_size",
        "full_cache_host_size",
        "preemption_mode",
        "swap_space",
        "kv_offloading_state_fraction",
        "preemption_victim",
        "kv_offloading_write_policy",
        "kv_offload_decode",
        "kv_offloading_disk_path",
        "kv_offloading_disk_size",
        "kv_load_policy",
        "kv_load_timeout",
        "kv_offloading_disk_write_policy",
        "kv_offloading_eviction_policy",
        "speculative_config",
        "batch_invariant",  # excludes compression
        "enforce_eager",
    }
)
REQUEST_CHECKED = frozenset({"compression", "compress_prompt_at"})
"""compression: CompressionConfig checks it. compress_prompt_at: only before as much text as was measured."""
REQUEST_FREE = frozenset(
    {
        "request_id",
        "prompt_token_ids",
        "params",
        "prompt",
        "continuation",
        "priority",
        "retention",
        "tenant",
        "is_rewritten",  # about snapshots, which are off
        "drop_at",  # about drop_spans, of which there are none
        "cache_salt",
        "options",  # RequestFeature.measured names the fields that matter
        "may_end_early",
    }
)
CURVE = curve(
    "knorm",
    {
        ("prose", 256): {160: 0.04, 208: 0.01},
        ("lookups", 256): {160: 0.2, 208: 0.04},
        ("prose", 440): {160: 0.3, 256: 0.04},
        ("lookups", 440): {160: 0.3, 256: 0.05},
    },
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = {length: tiny.prompts((length,), seed=length)[0] for length in (250, 257, 430, 450)}


@pytest.fixture(scope="module")
def bare(calibrated_dir) -> QueryStats:
    return QueryStats.load(calibrated_dir("llama") / STATS_FILE)


@pytest.fixture(scope="module")
def stats(bare) -> QueryStats:
    return bare.with_curve(CURVE)


@pytest.fixture(scope="module")
def llm(calibrated_dir) -> LLM:
    options = {"dtype": "float32", "device": "cpu"}
    return LLM(calibrated_dir("llama"), num_blocks=400, **options)


def promising(stats: QueryStats, max_loss: float = 0.05, **fields) -> CompressionConfig:
    return CompressionConfig("knorm", max_loss=max_loss, stats=stats, **fields)


@pytest.mark.parametrize("content", [None, "prose", "lookups"])
@pytest.mark.parametrize("max_loss", [0.01, 0.04, 0.05])
@pytest.mark.parametrize("length", PROMPTS)
def test_the_budget_is_the_curves(llm, stats, length, max_loss, content) -> None:
    """It serves as if it had been given; without one on the curve, the full cache, and outputs report it."""
    config = promising(stats, max_loss, content=content)
    budget = CURVE.promised("auto", max_loss, length, content)
    named = None if budget is None else CompressionConfig("knorm", budget, stats=stats)
    got, wanted = (llm.generate([PROMPTS[length]], GREEDY, each)[0] for each in (config, named))
    assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert got.metrics.budget == budget
    assert got.metrics.policy == ("full" if budget is None else "knorm")
    assert got.metrics.tokens_evicted == wanted.metrics.tokens_evicted
    assert_idle(llm)


def test_prefix_hits_and_forks_have_the_budget_of_the_whole_prompt(llm, stats) -> None:
    llm.engine.reset_prefix_cache()
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=4, ignore_eos=True)
    for hits in (False, True):
        (output,) = llm.generate([PROMPTS[430]], params, promising(stats))
        assert (output.metrics.num_cached_tokens > 0) == hits
        assert output.metrics.budget == 256
        assert output.metrics.tokens_evicted == 430 - 256  # once, before the fork
    assert_idle(llm)


def test_a_compressed_prefix_has_the_budget_of_its_own_length(llm, stats) -> None:
    """Prompts of different lengths share it. Where it must stay whole, it is not compressed."""
    llm.engine.reset_prefix_cache()
    for tail in (1, 120):
        prompt = {"prompt_token_ids": PROMPTS[250] + PROMPTS[257][:tail], "compress_prompt_at": 250}
        (output,) = llm.generate([prompt], GREEDY, promising(stats, content="prose"))
        assert output.metrics.budget == 160
        assert output.metrics.num_cached_tokens == (0 if tail == 1 else 250)
        (whole,) = llm.generate([prompt], GREEDY, promising(stats, 0.0))
        assert (whole.metrics.policy, whole.metrics.tokens_evicted) == ("full", 0)


def test_of_the_llm_and_beside_other_requests(calibrated_dir, stats) -> None:
    """Each prompt has its own; a request's compression goes first. Room is kept for the whole cache."""
    own = promising(stats)
    with LLM(
        calibrated_dir("llama"), dtype="float32", device="cpu", num_blocks=40, compression=own, block_size=16
    ) as llm:
        outputs = llm.generate(
            list(PROMPTS.values()), GREEDY, [None, None, promising(stats, 0.0), None], use_tqdm=False
        )
        assert [output.metrics.budget for output in outputs] == [208, 256, None, None]
        assert llm.engine.max_model_len == 512
        scored = llm.score([PROMPTS[430]], [[5, 6]])
        assert scored[0].metrics.budget == 256


def test_budgets_are_whole_blocks_and_no_fewer_tokens(calibrated_dir, stats) -> None:
    llm = LLM(calibrated_dir("llama"), dtype="float32", device="cpu", num_blocks=40, block_size=64)
    (output,) = llm.generate([PROMPTS[250]], GREEDY, promising(stats))
    assert output.metrics.budget == 256


def test_sinks_of_a_system_prompt_take_up_to_half_of_it(stats) -> None:
    config = promising(stats).protecting(100, 16)
    assert config.sinks == 112
    served = config.promised(CURVE, "auto", 430, 16)
    assert (served.budget, served.sinks, served.recent) == (256, 64, 128)
    assert promising(stats, sinks=9).promised(CURVE, "auto", 430, 16).sinks == 16


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"budget": 512}, "budget is 512 and max_loss 0.05, which chooses a budget; leave one out"),
            (
                {"recent": 64},
                "recent is 64, but losses are measured with 128; leave recent, or max_loss, out",
            ),
            ({"verify": True}, "verify is True, but losses are measured with False"),
            ({"max_loss": 1.5}, "max_loss is 1.5; it must be a number from 0.0 to 1.0"),
            ({"max_loss": None, "content": "prose"}, "content is 'prose', but max_loss is None"),
            ({"content": "poems"}, "content is 'poems'; it must be one of prose, lookups"),
            ({"options": {"keep": "large"}}, "options belong to a policy, and max_loss"),
        ],
    )
    def test_what_does_not_go_together(self, stats, fields, message) -> None:
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            CompressionConfig(**{"policy": "knorm", "max_loss": 0.05, "stats": stats, **fields})
        assert str(caught.value).endswith(".")

    def test_without_a_curve_or_under_another_policy(self, llm, bare, stats) -> None:
        for config, message in [
            (promising(bare), "max_loss is 0.05, and the statistics hold no loss curve of"),
            (promising(bare), "run `kvreclaim calibrate --curve 1024,2048` for this model, or give a budget"),
            (CompressionConfig("random", max_loss=0.1, stats=stats), "policy is 'random', but the loss was"),
        ]:
            with pytest.raises(InvalidArgumentError, match=message):
                llm.generate([PROMPTS[250]], GREEDY, config)
            with pytest.raises(InvalidArgumentError, match=message):
                llm.resolved(config)

    @pytest.mark.parametrize(
        "options",
        [
            {"max_num_batched_tokens": 16},
            {"hf_overrides": {"max_position_embeddings": 400}},  # statistics allow it
            {"spread_compression": False},
            {"conversation_snapshots": True},
            {"sparse_prefill": "pooled"},
            {"quantized_activations": "int8"},
        ],
    )
    def test_in_an_engine_under_which_it_was_not_measured(self, calibrated_dir, stats, options) -> None:
        (name,) = options
        with LLM(calibrated_dir("llama"), dtype="float32", device="cpu", num_blocks=40, **options) as llm:
            for refused in (llm.resolved, lambda config: llm.generate([PROMPTS[250]], GREEDY, config)):
                with pytest.raises(InvalidArgumentError, match="but losses are measured with") as caught:
                    refused(promising(stats))
                assert caught.value.field == name

    @pytest.mark.parametrize(
        ("name", "given"),
        [
            ("drop_spans", {"drop_spans": [(0, 100)], "drop_at": 120}),
            ("sparse_prefill", {"sparse_prefill": "pooled"}),
            ("conversation_snapshots", {"conversation_snapshots": True}),
            ("chunks", {"options": {Chunks: Chunks(((0, 100),))}}),
            ("compress_prompt_at", {"compress_prompt_at": 250 - CONTINUED - 1}),
        ],
    )
    def test_in_a_request_as_it_was_not_measured(self, llm, stats, name, given) -> None:
        options = take_options(FEATURES, given)
        spec = RequestSpec(
            prompt_token_ids=PROMPTS[250],
            params=GREEDY,
            compression=promising(stats),
            **({"options": options} | given),
        )
        with pytest.raises(InvalidArgumentError, match="but losses are measured") as caught:
            llm.promised(spec)
        assert caught.value.field == name

    def test_every_option_is_classified(self) -> None:
        """A new option must be put into one of the tables: does it change what compression loses?"""
        measured = [name for feature in FEATURES for name in feature.measured if not feature.is_made]
        of_options = [name for feature in FEATURES for name in feature.field_names()]
        own = [field.name for field in fields(RequestSpec)]
        for names, tables in (
            ([field.name for field in fields(EngineConfig)], (ENGINE_MEASURED, ENGINE_CHECKED, ENGINE_FREE)),
            (own + of_options, (measured, REQUEST_CHECKED, REQUEST_FREE)),
        ):
            assert sorted(name for table in tables for name in table) == sorted(names)
        config = EngineConfig()
        assert all(getattr(config, name) == values[0] for name, values in ENGINE_MEASURED.items())

    @pytest.mark.parametrize(
        ("form", "max_loss", "message"),
        [
            ("fp8", 0.05, r"is fp8_e4m3, and losses are measured in auto, int8, int4; .*,int4,fp8_e4m3`"),
            ("int4", 0.05, "keys and values in int4 lose more even if every token stays; allow more loss"),
        ],
    )
    def test_in_a_format_without_losses_or_with_more(self, make_llm, bare, form, max_loss, message) -> None:
        places = [(content, 256) for content in CONTENTS]
        coded = {
            name: {place: {256: loss} for place in places} for name, loss in (("int8", 0.04), ("int4", 0.06))
        }
        losses = curve("knorm", {place: {160: 0.04} for place in places}, coded)
        config = promising(bare.with_curve(losses), max_loss)
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            make_llm(num_blocks=8, kv_cache_dtype=form, compression=config)
        assert caught.value.field == "max_loss"
        with pytest.raises(InvalidArgumentError, match=message):
            make_llm(num_blocks=8, kv_cache_dtype=form).generate([PROMPTS[250]], GREEDY, config)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The demo model with a curve beside its weights."""
    path = shutil.copytree(demo_model(), tmp_path_factory.mktemp("demo") / "model")
    stats = QueryStats.load(path / STATS_FILE)
    losses = {
        "auto": {224: 0.3, 320: 0.04, 384: 0.01},
        "int8": {224: 0.3, 320: 0.09, 384: 0.03, 440: 0.02},
        "int4": {224: 0.3, 320: 0.2, 384: 0.12, 440: 0.1},
    }
    by_form = {form: {(content, 440): row for content in CONTENTS} for form, row in losses.items()}
    stats.with_curve(curve(stats.metadata.trial.best, by_form.pop("auto"), by_form)).save(path / STATS_FILE)
    return path


class TestFormats:
    @staticmethod
    def served(directory: Path, max_loss: float, **options: object) -> tuple[str, int | None]:
        """The format of the engine, and the budget of a prompt in it."""
        config = CompressionConfig(max_loss=max_loss)
        with LLM(directory, num_blocks=64, compression=config, **options) as llm:
            (output,) = llm.generate([[5 + i % 200 for i in range(430)]], GREEDY)
            assert (output.metrics.policy == "full") == (output.metrics.budget is None)
            return llm.engine.kv_format.name, output.metrics.budget

    @pytest.mark.parametrize(
        ("form", "max_loss", "budget"),
        [
            ("int8", 0.03, 384),
            ("int8", 0.09, 320),
            ("int8", 0.02, None),
            ("int4", 0.12, 384),
            ("fp32", 0.01, 384),
        ],
    )
    def test_of_a_format_by_hand_its_own_losses_count(self, directory, form, max_loss, budget) -> None:
        """Losses of other formats do not count."""
        assert self.served(directory, max_loss, dtype="float32", kv_cache_dtype=form) == (form, budget)

    @pytest.mark.parametrize(
        ("max_loss", "form", "budget"),
        [
            (0.01, "fp32", 384),  # the rounding of either code alone loses more
            (0.0, "fp32", None),
            (0.02, "int8", None),  # all tokens in int8 take fewer bytes than 384 in fp32
            (0.05, "int8", 384),
            (0.1, "int4", None),
            (0.2, "int4", 320),
        ],
    )
    def test_auto_takes_the_fewest_bytes(self, directory, max_loss, form, budget, caplog) -> None:
        with caplog.at_level(logging.INFO):
            assert self.served(directory, max_loss, dtype="float32") == (form, budget)
        chosen = [line for line in caplog.messages if line.startswith("kv_cache_dtype is")]
        share = (budget or 440) / 440 / DENSITIES.get(form, 1.0)
        text = (
            f"kv_cache_dtype is {form}, which keeps max_loss {max_loss:g} in the fewest bytes, {share:.0%} of"
        )
        assert chosen == ([] if form == "fp32" else [f"{text} a prompt's; name one to keep it"])

    def test_a_requests_own_loss_changes_the_tokens_alone(self, directory) -> None:
        with LLM(directory, num_blocks=64, compression=CompressionConfig(max_loss=0.05)) as llm:
            prompt = [5 + i % 200 for i in range(430)]
            (output,) = llm.generate([prompt], GREEDY, CompressionConfig(max_loss=0.09))
            assert output.metrics.budget == 320
            with pytest.raises(InvalidArgumentError, match="in int8 lose more even if every token stays"):
                llm.generate([prompt], GREEDY, CompressionConfig(max_loss=0.01))


def test_a_share_of_the_prompt_is_a_budget_in_tokens(tiny_dir) -> None:
    llm = LLM(tiny_dir("llama"), num_blocks=64, compression=CompressionConfig("knorm", "50%", 16, 2, 4))
    params = SamplingParams(temperature=0.0, max_tokens=8)
    for length, budget in ((100, 48), (200, 96), (10, 16)):
        prompt = list(range(1, length + 1))
        (got,) = llm.generate({"prompt_token_ids": prompt}, params)
        (same,) = llm.generate(
            {"prompt_token_ids": prompt}, params, CompressionConfig("knorm", budget, 16, 2, 4)
        )
        assert got.metrics.budget == budget
        assert got.outputs[0].token_ids == same.outputs[0].token_ids
        assert got.metrics.tokens_evicted == same.metrics.tokens_evicted
