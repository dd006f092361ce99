"""A budget that is a share of the prompt counts as the tokens that the engine makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import tiny
from curves import curve
from typer.testing import CliRunner

from kvreclaim import LLM, CompressionConfig
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.cli.main import app
from kvreclaim.compression.spec.traits import for_prompt
from kvreclaim.compression_settings import CONTENTS
from kvreclaim.engine.request.spec import footprint_of
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.budget.footprint import SAME, Footprint
from kvreclaim.sim.options import ReplicaOptions, Serving

PLAN = ("plan", "--model", "Llama-3.1-8B", "--gpu", "4090", "--weights", "awq4")
SIMULATE = ("simulate", "--model", "Llama-3.1-8B", "--gpu", "H100", "--num-blocks", "400")
UNTIMED = {"simulated_requests_per_min_per_core", "wall_s", "elapsed_s"}


def run(tmp_path: Path, *arguments: str) -> dict:
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text())


@pytest.mark.parametrize("policy", ["knorm", "pyramidkv"])
@pytest.mark.parametrize("sinks", [0, 4, 100])
@pytest.mark.parametrize(
    ("share", "form"), [("20%", "auto"), ("0.2", "int8"), ("100%", "auto"), ("10%", "int4")]
)
def test_every_length_has_the_budget_of_the_engine(policy, sinks, share, form) -> None:
    config = CompressionConfig(policy, share, sinks=sinks, recent=40)
    machine = ReplicaOptions(gpu="H100", kv_cache_dtype=form)
    density = machine.density  # Llama 3.1 8B: 8 heads of 128 in bf16
    assert density == {"auto": 1, "int8": Fraction(512, 259), "int4": Fraction(512, 144)}[form]
    by_prompt = Serving(compression=f"{policy}:budget={share},sinks={sinks},recent=40").by_prompt(machine)
    for length in (1, 300, 1000, 8192):
        found, own = by_prompt(length), config.for_prompt(length, 16, density).footprint(Footprint())
        assert (found.budget, found.sinks, found.recent) == (own.budget, own.sinks, own.recent)


def test_tokens_stay_as_they_are_written() -> None:
    assert for_prompt("knorm:budget=300, recent=7", 1000, 16, SAME) == "knorm:budget=300, recent=7"
    assert for_prompt("knorm:recent=7,budget=20%", 1000, 16, SAME) == "knorm:budget=192,recent=7"
    assert for_prompt("knorm:recent=7,budget=20%", 1000, 16, Fraction(2)) == "knorm:budget=400,recent=7"


@pytest.mark.parametrize("share", ["20%", "0.2"])
@pytest.mark.parametrize(
    ("length", "budget"),
    [
        (("--context", "8192"), 1632),
        (("--context", "300"), 144),
        (("--sequences", "10", "--own", "5000"), 992),
        (("--sequences", "10", "--prefix", "1000", "--own", "4000"), 992),
    ],
)
def test_a_plan_is_that_of_the_tokens(tmp_path, share, length, budget) -> None:
    """A fifth in whole blocks; at least 133 tokens, which 9 blocks hold."""
    shared, given = (
        run(tmp_path, *PLAN, *length, "--compression", f"snapkv:budget={each}") for each in (share, budget)
    )
    assert shared == given


def test_a_plan_in_another_format_is_that_of_as_many_bytes(tmp_path) -> None:
    """A fifth of 8,192 tokens of 512 bytes a head, where a token in int8 takes 259."""
    options = (*PLAN, "--context", "8192", "--kv-cache-dtype", "int8")
    tokens = 8192 * 512 // 5 // 259 // 16 * 16
    shared, given = (
        run(tmp_path, *options, "--compression", f"snapkv:budget={each}") for each in ("20%", tokens)
    )
    assert shared == given


@pytest.mark.parametrize(("form", "tokens"), [("auto", 400), ("int8", 784)])
def test_a_simulation_is_that_of_the_tokens(tmp_path, form, tokens) -> None:
    load = (
        "--requests",
        "20",
        "--rate",
        "50",
        "--prompt",
        "2000",
        "--output",
        "200",
        "--kv-cache-dtype",
        form,
    )
    shared, given = (
        run(tmp_path, *SIMULATE, *load, "--compression", f"knorm:budget={each}") for each in ("20%", tokens)
    )
    assert shared["blocks_freed"] > 0
    assert {k: v for k, v in shared.items() if k not in UNTIMED} == {
        k: v for k, v in given.items() if k not in UNTIMED
    }


def test_each_prompt_of_a_simulation_has_its_own_budget(tmp_path) -> None:
    """Two requests that do not meet: their counts are the sum of two runs with tokens."""
    trace = tmp_path / "two.jsonl"

    def counts(requests: list[tuple[int, int]], budget: object) -> list[int]:
        lines = [
            {"timestamp": at, "input_length": length, "output_length": 300, "hash_ids": []}
            for at, length in requests
        ]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = ("--trace", str(trace), "--compression", f"knorm:budget={budget}")
        report = run(tmp_path, *SIMULATE, *options, "--no-spread-compression")
        return [report["passes"], report["blocks_freed"]]

    alone = [counts([(0, 1000)], 192), counts([(0, 3000)], 592)]
    both = counts([(0, 1000), (100_000, 3000)], "20%")
    assert both == [sum(each) for each in zip(*alone, strict=True)]
    assert alone[0] != alone[1]


@pytest.mark.parametrize("bad", ["0", "many", "1.5", "120%", "200%", "20000%", "-0.2"])
def test_bad_budgets_are_one_sentence(bad) -> None:
    with pytest.raises(InvalidArgumentError) as config:
        CompressionConfig("knorm", bad)
    for command in ((*PLAN, "--context", "300"), (*SIMULATE, "--requests", "2", "--rate", "1")):
        result = CliRunner().invoke(app, [*command, "--compression", f"knorm:budget={bad}"])
        assert result.exit_code == 2, result.output
        assert str(config.value) in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (PLAN, "a share of each prompt, and a plan has one budget"),
        ((*PLAN, "--context", "300", "--sequences", "4", "--own", "9"), "a plan has one budget"),
        (
            (*SIMULATE, "--requests", "2", "--rate", "1", "--slo", "ttft=2s", "--search", "budget"),
            "needs a policy with a budget in tokens",
        ),
    ],
)
def test_a_share_without_one_length_is_refused(command, message) -> None:
    result = CliRunner().invoke(app, [*command, "--compression", "knorm:budget=20%"])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command", [(*PLAN, "--context", "300"), (*SIMULATE, "--requests", "2", "--rate", "1")]
)
def test_a_share_of_the_full_cache_is_refused(command) -> None:
    result = CliRunner().invoke(app, [*command, "--compression", "full:budget=20%"])
    assert result.exit_code == 2, result.output
    assert "policy 'full' keeps every token, and budget 0.2" in result.stderr


CURVE = curve(
    "knorm",
    {
        ("prose", 256): {160: 0.04, 208: 0.01},
        ("lookups", 256): {160: 0.2, 208: 0.04},
        ("prose", 384): {168: 0.05, 256: 0.04},
        ("lookups", 384): {168: 0.05, 256: 0.05},
    },
)


@pytest.fixture(scope="module")
def llm(tiny_dir) -> LLM:
    return LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=40)


@pytest.fixture(scope="module")
def file(llm, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("curve") / "stats.safetensors"
    calibrate(llm.loaded, tiny.prompts((90,)), num_centers=2).with_curve(CURVE).save(path)
    return path


def loss_args(file: Path, max_loss: float) -> tuple[str, ...]:
    return "--kv-max-loss", str(max_loss), "--kv-compression-stats", str(file)


@pytest.mark.parametrize("content", [None, "prose", "lookups"])
@pytest.mark.parametrize("max_loss", [0.0, 0.04, 0.05])
def test_every_length_has_the_engines_footprint(llm, file, max_loss, content) -> None:
    machine = ReplicaOptions(gpu="H100")
    promise = Serving(max_loss=max_loss, content=content, stats=str(file)).promise_on(machine)
    assert promise.kv_cache_dtype == "auto"
    config = CompressionConfig("knorm", max_loss=max_loss, content=content, stats=file)
    engine = replace(llm.engine.config, spread_compression=False)  # offset 0, whatever the prompt
    for length in (1, 200, 256, 257, 384, 385):
        compressor = llm.compressor(llm.compressors.promised(config, length))
        keeps_all = compressor.eviction_method.keeps_all
        own = footprint_of(None if keeps_all else compressor, engine, [1] * length)
        assert promise.footprint(length, engine.block_size, engine.max_num_batched_tokens) == own


@pytest.mark.parametrize(
    ("context", "max_loss", "budget"), [(250, 0.05, 208), (300, 0.05, 176), (300, 0.0, 0)]
)
def test_a_plan_is_that_of_the_promised_budget(tmp_path, file, context, max_loss, budget) -> None:
    """168 tokens are 11 blocks; 0: nothing goes."""
    model = ("plan", "--model", "Llama-3.1-8B", "--gpu", "4090", "--weights", "awq4")
    named = ("--compression", f"knorm:budget={budget}") if budget else ()
    promised, given = (
        run(tmp_path, *model, "--context", str(context), *options)
        for options in (loss_args(file, max_loss), named)
    )
    assert promised == given


@pytest.mark.parametrize(
    ("prompt", "max_loss", "budget"), [(250, 0.05, 208), (380, 0.05, 176), (400, 0.05, 0)]
)
def test_a_simulation_is_that_of_the_promised_budget(tmp_path, file, prompt, max_loss, budget) -> None:
    load = ("simulate", "--requests", "20", "--rate", "50", "--prompt", str(prompt), "--output", "200")
    machine = ("--model", "Llama-3.1-8B", "--gpu", "H100", "--num-blocks", "80")
    named = ("--compression", f"knorm:budget={budget}") if budget else ()
    promised, given = (run(tmp_path, *load, *machine, *more) for more in (loss_args(file, max_loss), named))
    counted = (
        "requests",
        "blocks_freed",
        "peak_blocks",
        "passes",
        "steps",
        "preemptions",
        "ttft_s",
        "refused",
    )
    assert [promised[name] for name in counted] == [given[name] for name in counted]
    assert (promised["blocks_freed"] > 0) == bool(budget)


@pytest.fixture(scope="module")
def coded(llm, tmp_path_factory) -> Path:
    """int8 loses .02 by its rounding, int4 .1."""
    path = tmp_path_factory.mktemp("coded") / "stats.safetensors"
    stats = calibrate(llm.loaded, tiny.prompts((90,)), num_centers=2)
    losses = {
        "auto": {160: 0.04, 256: 0.01},
        "int8": {160: 0.08, 256: 0.03, 384: 0.02},
        "int4": {160: 0.3, 256: 0.12, 384: 0.1},
    }
    by_form = {form: {(content, 384): row for content in CONTENTS} for form, row in losses.items()}
    stats.with_curve(curve("knorm", by_form.pop("auto"), by_form)).save(path)
    return path


FORMATS = pytest.mark.parametrize(
    ("dtype", "max_loss", "form", "budget"),
    [
        ("auto", 0.01, "auto", 256),
        ("auto", 0.02, "int8", 0),
        ("auto", 0.04, "int8", 256),
        ("auto", 0.1, "int8", 160),  # 160 tokens in int8 take fewer bytes than 384 in int4
        ("auto", 0.12, "int4", 256),
        ("auto", 0.3, "int4", 160),
        ("int8", 0.08, "int8", 160),
        ("int4", 0.1, "int4", 0),
        ("bf16", 0.04, "bf16", 160),
    ],
)


@FORMATS
def test_a_plan_has_the_format_of_the_engine(tmp_path, coded, dtype, max_loss, form, budget) -> None:
    model = ("plan", "--model", "Llama-3.1-8B", "--gpu", "4090", "--weights", "awq4", "--context", "380")
    named = ("--compression", f"knorm:budget={budget}") if budget else ()
    options = ((*loss_args(coded, max_loss), "--kv-cache-dtype", dtype), (*named, "--kv-cache-dtype", form))
    promised, given = (run(tmp_path, *model, *each) for each in options)
    assert promised == given


@FORMATS
def test_a_simulation_has_the_format_of_the_engine(tmp_path, coded, dtype, max_loss, form, budget) -> None:
    """Its pool holds more blocks, and the comparison is with the whole cache as it was named."""
    load = ("simulate", "--requests", "4", "--rate", "50", "--prompt", "380", "--output", "40", "--compare")
    machine = ("--model", "Llama-3.1-8B", "--gpu", "H100")
    named = ("--compression", f"knorm:budget={budget}") if budget else ()
    options = ((*loss_args(coded, max_loss), "--kv-cache-dtype", dtype), (*named, "--kv-cache-dtype", form))
    promised, given = (run(tmp_path, *load, *machine, *each) for each in options)
    for name in ("blocks_freed", "peak_blocks", "passes", "steps", "ttft_s", "num_blocks"):
        assert promised[name] == given[name]
    plain = run(tmp_path, *load[:-1], *machine, "--kv-cache-dtype", dtype)
    assert promised["beside"]["whole cache"]["num_blocks"] == plain["num_blocks"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kv-max-loss", "0.1"), "no statistics are named; run `kvreclaim calibrate --curve"),
        (("--kv-compression-stats", "a"), "stats is 'a', but max_loss is None"),
        (("--kv-content", "prose"), "content is 'prose', but max_loss is None"),
        (("--kv-max-loss", "0.1", "--compression", "knorm"), "compression is 'knorm' and max_loss 0.1"),
        (("--kv-max-loss", "0.1", "--kv-compression-stats", "no-such"), "'no-such' cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(options, message) -> None:
    plan = ("plan", "--model", "Llama-3.1-8B", "--context", "300")
    simulate = ("simulate", "--requests", "2", "--rate", "1", "--gpu", "H100")
    for command in (plan, simulate):
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_format_that_cannot_hold_the_loss_is_refused(coded) -> None:
    plan = ("plan", "--model", "Llama-3.1-8B", "--context", "300", *loss_args(coded, 0.05))
    for form, message in (
        ("int4", "in int4 lose more even if every token stays"),
        ("fp8", "is fp8_e4m3, and"),
    ):
        result = CliRunner().invoke(app, [*plan, "--kv-cache-dtype", form])
        assert result.exit_code == 2
        assert message in result.stderr


def test_a_plan_has_one_length(file) -> None:
    for more in ((), ("--context", "300", "--sequences", "4", "--own", "9")):
        result = CliRunner().invoke(app, ["plan", "--model", "Llama-3.1-8B", *loss_args(file, 0.1), *more])
        assert result.exit_code == 2
        assert "max_loss gives each length its budget, and a plan has one" in result.stderr
