"""`bench decode` on the demo model: the file's structure, the check before timing, and refusals."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvreclaim import demo_model
from kvreclaim.bench import decode, verify
from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.systems.base import NAMES, Point, SkipPoint, SystemSetup, random_prompts
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.bench.verify import FormatReferee, Referee, WrongTokensError
from kvreclaim.cli.main import app
from kvreclaim.errors import InvalidArgumentError

runner = CliRunner()
SMALL = ("--threads", 1, "--rounds", 1, "--dtype", "float32", "--budget", 96, "--interval", 8, "--steps", 4)


def run(*arguments):
    return runner.invoke(app, ["bench", *(str(argument) for argument in arguments)])


def plan(**changes):
    fields = {"model": demo_model(), "dtype": "float32", "threads": 1, "rounds": 1, "steps": 4}
    fields |= {"contexts": (200,), "batches": (2,), "budget": 96, "interval": 8}
    return DecodePlan(**(fields | changes))


def test_decode_writes_rows_for_every_system_and_point(tmp_path):
    file = tmp_path / "out" / "decode.json"
    peers = ("--peers", "transformers")
    grid = ("--contexts", 160, "--batches", 2)
    result = run("decode", "--model", demo_model(), *grid, *peers, *SMALL, "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert set(report) >= {"machine", "versions", "commit", "command", "rows", "verification"}
    assert set(report["machine"]) >= {"cpu", "cores", "flags", "memory_gib"}
    found = {(row["system"], row["context"], row["batch"]) for row in report["rows"]}
    assert found == {(name, 160, 2) for name in (*NAMES, "transformers")}
    for row in report["rows"]:
        assert row["tokens_per_s"] > 0, row
        assert row["verified"] is (True if "budget" not in row else None)
        assert row["model"] == "demo_model"
    assert all(check["passed"] and check["exact"] == 1 for check in report["verification"])
    assert "decode tokens/s" in result.output


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_holds_only_decodes_of_every_sequence(name):
    point = Point(180, 3, 64)
    system = KvreclaimSystem(
        name, SystemSetup(demo_model(), "float32", 1), [point], config=plan().compression(name)
    )
    session = system.open(point)
    before = system.llm.engine.totals.prompt_tokens
    timed = session.run(16)
    assert (timed.steps, timed.tokens) == (16, 48)
    assert system.llm.engine.totals.prompt_tokens == before
    assert (system.llm.engine.totals.compactions > 0) == (name != "kvreclaim-full")
    session.close()
    assert not system.llm.engine.has_unfinished


def test_synthetic_fill_leaves_the_model_as_it_was():
    point = Point(100, 2, 16)
    system = KvreclaimSystem("kvreclaim-full", SystemSetup(demo_model(), "float32", 1), [point])
    prompts = random_prompts(2, 100, 256, seed=3)
    before = system.generate(prompts, 6)
    system.open(point).close()
    assert system.generate(prompts, 6) == before


def test_prefill_and_synthetic_fill_reach_the_same_context():
    lengths = []
    for fill in ("prefill", "synthetic"):
        point = Point(100, 2, 16, fill)
        system = KvreclaimSystem("kvreclaim-full", SystemSetup(demo_model(), "float32", 1), [point])
        session = system.open(point)
        lengths.append([len(request.sequences[0].token_ids) for request in session.requests])
        session.close()
    assert lengths[0] == lengths[1]


def test_prompts_share_no_first_token():
    prompts = random_prompts(32, 5, 16_384, seed=0)
    assert len({prompt[0] for prompt in prompts}) == 32
    assert random_prompts(32, 5, 16_384, seed=0) == prompts


def test_a_system_with_other_tokens_is_not_timed(monkeypatch):
    honest = KvreclaimSystem.generate

    def wrong(self, prompts, max_tokens):
        outputs = honest(self, prompts, max_tokens)
        outputs[0][3] = (outputs[0][3] + 1) % 256
        return outputs

    monkeypatch.setattr(KvreclaimSystem, "generate", wrong)
    monkeypatch.setattr(decode, "time_point", lambda *_: pytest.fail("timed before it was verified"))
    with pytest.raises(WrongTokensError, match=r"kvreclaim-full in float32"):
        decode.run(plan(systems=("kvreclaim-full",)))


def test_bf16_rounding_is_within_the_margin_and_a_clear_mistake_is_not():
    referee = Referee(demo_model())
    prompts = random_prompts(2, 60, 256, seed=5)
    outputs = [referee.greedy(prompt, 8) for prompt in prompts]
    assert referee.judge("x", "bfloat16", prompts, outputs).passed
    gaps = referee.gaps(prompts[0], outputs[0])
    assert float(gaps.max()) == 0.0
    outputs[1][2] = (outputs[1][2] + 7) % 256
    judged = referee.judge("x", "bfloat16", prompts, outputs)
    assert judged.largest_gap > verify.MARGIN_STDS
    assert not judged.passed
    assert judged.exact < 1


def test_a_dtype_may_round_as_much_as_generate_does_in_it(monkeypatch):
    referee = Referee(demo_model())
    prompts = random_prompts(2, 60, 256, seed=5)
    wrong = [referee.greedy(prompt, 8) for prompt in prompts]
    wrong[1][2] = (wrong[1][2] + 7) % 256
    gap = referee.judge("x", "float32", prompts, wrong).largest_gap
    monkeypatch.setattr(verify.Generate, "generate", lambda *_: wrong)
    judged = referee.judge("x", "bfloat16", prompts, wrong)
    assert judged.passed
    assert judged.allowed == judged.largest_gap == gap > verify.MARGIN_STDS
    assert not referee.judge("x", "float32", prompts, wrong).passed
    worse = [list(reversed(out)) for out in wrong]
    assert referee.judge("x", "bfloat16", prompts, worse).allowed == gap
    assert not referee.judge("x", "bfloat16", prompts, worse).passed


def test_what_exceeds_memory_or_time_is_skipped_with_its_reason(monkeypatch):
    monkeypatch.setattr(KvreclaimSystem, "new_bytes", lambda *_: 1 << 60)
    rows = decode.run(plan(systems=("kvreclaim-full",)), check=False).rows
    assert rows[0]["tokens_per_s"] is None
    assert "GiB" in rows[0]["skipped"]
    monkeypatch.undo()
    rows = decode.run(plan(systems=("kvreclaim-full",), limit_s=1e-6), check=False).rows
    assert "exceed the limit" in rows[0]["skipped"]


def test_formats_are_systems_of_their_own(tmp_path):
    file = tmp_path / "decode.json"
    grid = ("--contexts", 100, "--batches", 2, "--systems", "full", "--kv-cache-dtype", "auto,int8,bf16")
    result = run("decode", "--model", demo_model(), *grid, *SMALL, "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    rows = {row["system"]: row for row in report["rows"]}
    assert {name: row["kv_cache_dtype"] for name, row in rows.items()} == {
        "kvreclaim-full": "fp32",
        "kvreclaim-full:int8": "int8",
        "kvreclaim-full:bf16": "bf16",
    }
    assert all(row["verified"] and row["tokens_per_s"] > 0 for row in rows.values())
    assert "full int8 / full" in " ".join(result.output.split())


def test_a_coded_cache_is_judged_by_the_reference_in_its_format():
    prompts = random_prompts(2, 300, 256, seed=5)
    model = Referee(demo_model())
    referee = FormatReferee(demo_model(), "int4", model)
    outputs = [referee.greedy(prompt, 8) for prompt in prompts]
    judged = [referee.judge("x", dtype, prompts, outputs) for dtype in ("float32", "bfloat16")]
    assert all(each.passed and each.exact == 1 and each.largest_gap < 1e-3 for each in judged)
    gap = max(float(model.gaps(*pair).max()) for pair in zip(prompts, outputs, strict=True))
    assert [each.allowed for each in judged] == [verify.MARGIN_STDS, verify.MARGIN_STDS + gap]
    outputs[1][2] = (outputs[1][2] + 7) % 256
    assert not referee.judge("x", "float32", prompts, outputs).passed
    assert not referee.judge("x", "bfloat16", prompts, outputs).passed


def test_a_dead_peer_is_a_skipped_point(tmp_path):
    from kvreclaim.bench.systems.worker_process import VllmProcess

    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    script.chmod(0o755)
    process = VllmProcess(script, 1, 1)
    with pytest.raises(SkipPoint, match=r"no such module"):
        process.ask("load")
    process.close()
    process.log.unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "no/such"), "make bench-model"),
        (("--peers", "nope"), "nope"),
        (("--peers", "vllm"), "make vllm-env"),
        (("--contexts", "8k"), "no list of numbers"),
        (("--dtype", "int8"), "int8"),
        (("--kv-cache-dtype", "int8,nope"), "kv_cache_dtype is 'nope'"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, message):
    model = () if "--model" in arguments else ("--model", demo_model())
    result = run("decode", *model, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_peer_without_its_interpreter_is_refused(tmp_path):
    from kvreclaim.bench.systems.worker_process import VllmProcess

    with pytest.raises(InvalidArgumentError, match="make vllm-env"):
        VllmProcess(tmp_path / "python", 1, 1)
