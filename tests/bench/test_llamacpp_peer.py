"""llama.cpp as a peer of `bench decode`: refusals, the worker over a stand-in, the real library."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
from typer.testing import CliRunner

from kvreclaim import demo_model
from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.decode_table import ratio_table, short
from kvreclaim.bench.systems.base import Point, SkipPoint, SystemSetup
from kvreclaim.bench.systems.worker_process import LOOP, LlamaCpp
from kvreclaim.bench.verify import LEAST_TOP1, MARGIN_STDS, PackedReferee, WrongTokensError, require_agreement
from kvreclaim.cli.main import app

runner = CliRunner()
REAL = Path(".llamacpp-env/bin/python").absolute()
STUB = Path(__file__).with_name("llamacpp_stub")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf.write(path)
    return path


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Where the parts of GGUF files are kept."""
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def python(tmp_path):
    """An interpreter whose llama_cpp is the stand-in."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={STUB} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def system(python, file):
    setup = SystemSetup(file, "bfloat16", 1)
    with closing(LlamaCpp("llamacpp", setup, python=python, cache_type="f16")) as system:
        yield system


def decode(*arguments):
    return runner.invoke(app, ["bench", "decode", *map(str, arguments)])


def test_a_missing_environment_is_refused(file):
    result = decode("--model", file, "--peers", "llamacpp", "--llamacpp-python", "no/python")
    assert result.exit_code == 2
    assert "run `make llamacpp-env`, or leave llamacpp out" in " ".join(result.stderr.split())


def test_another_kind_of_model_is_refused(python):
    result = decode("--model", demo_model(), "--peers", "llamacpp", "--llamacpp-python", python)
    assert result.exit_code == 2
    assert "llama.cpp reads .gguf files" in result.stderr


def test_activations_are_systems_of_their_own(file):
    plan = DecodePlan(model=file, systems=("kvreclaim-full",), activations=("auto", "int8"))
    assert plan.names == ("kvreclaim-full", "kvreclaim-full@int8")
    assert [plan.activations_of(name) for name in plan.names] == ["auto", "int8"]
    assert [plan.kv_cache_dtype("kvreclaim-full:int4@int8"), short("kvreclaim-full:int4@int8")] == [
        "int4",
        "full int4 @int8",
    ]
    assert plan.compression("kvreclaim-full:int4@int8") is None
    result = decode("--model", file, "--quantized-activations", "int7")
    assert result.exit_code == 2
    assert "int7" in result.stderr


def test_greedy_tokens_come_from_the_logits_of_the_last_place(system):
    assert system.versions() == {"llama-cpp-python": "0-stub"}
    assert system.generate([[5, 6, 7], [9]], 3) == [[21, 63, 189], [27, 81, 43]]


@pytest.mark.parametrize("fill", ["prefill", "synthetic"])
def test_a_filled_cache_decodes_every_sequence(system, fill):
    with closing(system.open(Point(600, 3, 8, fill))) as session:
        timed = session.run(4)
    assert (timed.steps, timed.tokens) == (4, 12)
    assert timed.elapsed_s > 0


def test_a_synthetic_fill_repeats_the_states_rows(python, file, tmp_path):
    script = tmp_path / "ask.py"
    script.write_text(
        "import llamacpp_worker as w, numpy as np, sys\n"
        "s = w.LlamaCppStreams('m', 1, w.CACHE_TYPES['f16'], 2, 900)\n"
        "s.prompt(0, [5, 6, 7])\n"
        "assert (w.repeated(s.state(), 3) == s.state()).all()\n"
        "s.set_state(w.repeated(s.state(), 8), 1, 8)\n"
        "print([int(each) for each in s.context.keys[1]])\n"
        "try: w.repeated(s.state()[:-1], 8)\n"
        "except ValueError as error: print(error)\n"
    )
    import subprocess

    environment = os.environ | {"PYTHONPATH": f"{STUB}:{LOOP.parent}"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "[5, 6, 7, 5, 6, 7, 5, 6]",
        "the state is laid out in a way that is not known here; pass --fill prefill",
    ], done.stderr


def test_an_error_of_the_library_is_a_skipped_point(system):
    with pytest.raises(SkipPoint, match=r"llama\.cpp failed: RuntimeError: llama_decode answered 1"):
        system.generate([[264]], 1)


def test_tokens_at_chance_level_are_refused(file):
    referee = PackedReferee(file)
    prompts = [[5, 6, 7, 8] * 6, [40, 41, 42] * 8]
    honest = [referee.greedy(prompt, 6) for prompt in prompts]
    judged = referee.judge("llamacpp", "bfloat16", prompts, honest)
    assert (judged.passed, judged.top1, judged.exact) == (True, 1.0, 1.0)
    wrong = [[(token + 7) % 200 for token in tokens] for tokens in honest]
    judged = referee.judge("llamacpp", "bfloat16", prompts, wrong)
    assert judged.top1 < LEAST_TOP1
    with pytest.raises(WrongTokensError, match=r"llamacpp: .* the model's first choice, of at least 50%"):
        require_agreement([judged])


def test_ratios_pair_like_caches():
    names = ("kvreclaim-full", "kvreclaim-full:int8@int8", "llamacpp", "llamacpp:q8_0")
    rows = [
        {"system": name, "context": 1, "batch": 1, "tokens_per_s": 1.0 + at} for at, name in enumerate(names)
    ]
    headings = [str(column.header) for column in ratio_table(rows).columns]
    assert headings[1:] == [
        "full int8 @int8 / full",
        "full / llama.cpp",
        "full int8 @int8 / llama.cpp q8_0",
    ]


@pytest.mark.skipif(not REAL.is_file(), reason="`make llamacpp-env` has not been run")
def test_the_real_library_draws_the_models_tokens(file):
    referee = PackedReferee(file)
    prompts = [[5, 6, 7, 8] * 6, [40, 41, 42] * 8]
    setup = SystemSetup(file, "bfloat16", 1)
    with closing(LlamaCpp("llamacpp", setup, python=REAL, cache_type="f16")) as system:
        answers = system.generate(prompts, 8)
        assert referee.judge("llamacpp", "bfloat16", prompts, answers).largest_gap <= MARGIN_STDS
        with closing(system.open(Point(700, 2, 8))) as session:
            assert session.run(4).tokens == 8


def test_the_file_and_the_tables(python, file, tmp_path, monkeypatch):
    monkeypatch.setattr("kvreclaim.bench.decode.verify", lambda *_: [])
    out = tmp_path / "out.json"
    grid = ("--contexts", 40, "--batches", 2, "--prompts", 30, "--rounds", 1, "--steps", 2, "--threads", 1)
    peer = ("--peers", "llamacpp,llamacpp:q8_0", "--llamacpp-python", python)
    result = decode("--model", file, "--systems", "full", *grid, *peer, "--json", out)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    names = {"kvreclaim-full", "llamacpp", "llamacpp:q8_0"}
    for rows in (report["rows"], report["prompts"]):
        assert {row["system"] for row in rows} == names
        assert all(row["tokens_per_s"] > 0 for row in rows)
    assert report["versions"]["llama-cpp-python"] == "0-stub"
    assert np.isfinite(report["prompts"][0]["first_token_s"])
