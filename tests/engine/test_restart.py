"""A second process finds on disk what the first one computed, and no other process finds anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from disks import GIB, Failing, Held, tiers
from safetensors.torch import load_file, save_file
from settings import assert_idle, with_options

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.prefix.index import sha256
from kvreclaim.offload.store.file_io import FileIO

PROMPTS = tiny.prompts((150, 97, 260, 40), seed=4)
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
FULL_BLOCKS = sum((len(prompt) - 1) // 16 for prompt in PROMPTS)


def answers_and_hits(llm, params=PARAMS, salt=None, **more):
    """Return tokens and log-probabilities, and how many blocks of the prompts were hit."""
    outputs = llm.generate(with_options(PROMPTS, cache_salt=salt), params, **more)
    assert all(output.error is None for output in outputs)
    assert_idle(llm)
    hits = sum(output.metrics.num_cached_tokens for output in outputs) // 16
    answers = [
        (
            output.outputs[0].token_ids,
            [entry.logprob for drawn in output.outputs[0].logprobs for entry in drawn.values()],
        )
        for output in outputs
    ]
    return answers, hits


def closed(llm):
    llm.close()
    llm.engine.memory.check()


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp8_e4m3", "int8", "int4", "turboquant4"])
@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_a_restart_keeps_the_cache(form, kernels, tmp_path, make_llm):
    options = {"kv_cache_dtype": form, "kernels": kernels}
    plain, _ = answers_and_hits(make_llm(**options))
    first = make_llm(**tiers(tmp_path, **options))
    found, hits = answers_and_hits(first)
    assert found == plain
    assert hits == 0
    closed(first)
    second = make_llm(**tiers(tmp_path, **options))
    again, hits = answers_and_hits(second)
    assert hits >= 0.95 * FULL_BLOCKS
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in plain]
    assert second.engine.tiers.disk.counters.corrupt == 0
    closed(second)


def test_damaged_slots_are_misses(tmp_path, make_llm):
    """One of 64 bytes, spread over the record, is flipped in every slot: nothing wrong is ever used."""
    first = make_llm(**tiers(tmp_path))
    plain, _ = answers_and_hits(first)
    file = first.engine.tiers.disk.file
    length, count = file.layout.slot, file.num_slots
    used = file.layout.header + file.layout.payload
    closed(first)
    path = max((each for each in tmp_path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    whole = path.read_bytes()
    for part in range(4):
        damaged = bytearray(whole)
        for slot in range(count):
            place = (part * 16 + slot % 16) * (used - 1) // 63
            damaged[slot * length + place] ^= 1 << slot % 8
        path.write_bytes(damaged)
        llm = make_llm(**tiers(tmp_path))
        found, _ = answers_and_hits(llm)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
        for (_, got), (_, expected) in zip(found, plain, strict=True):
            assert got == pytest.approx(expected, abs=1e-4), "a damaged block was used"
        assert llm.engine.tiers.disk.counters.corrupt or llm.engine.tiers.disk.num_recovered < 30
        closed(llm)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_dtype": "bf16"},
        {"block_size": 32},
        {"kernels": "reference"},
        {"family": "qwen3"},
    ],
)
def test_what_differs_finds_nothing(change, tmp_path, make_llm):
    first = make_llm(**tiers(tmp_path, kernels="native"))
    answers_and_hits(first)
    closed(first)
    other = make_llm(**tiers(tmp_path, **({"kernels": "native"} | change)))
    plain, _ = answers_and_hits(make_llm(**({"kernels": "native"} | change)))
    found, hits = answers_and_hits(other)
    assert hits == 0
    assert found == plain
    closed(other)


def test_one_weight_differs(tmp_path, make_llm, calibrated_dir):
    copy = tmp_path / "model"
    shutil.copytree(calibrated_dir("llama"), copy)
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 200, **tiers(tmp_path / "disk")}
    llm = LLM(copy, **options)
    answers_and_hits(llm)
    closed(llm)
    llm = LLM(copy, **options)
    assert answers_and_hits(llm)[1] >= 0.95 * FULL_BLOCKS
    closed(llm)
    weights = load_file(copy / "model.safetensors")
    name = sorted(weights)[-1]
    weights[name].view(-1)[-1] += 0.25
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(copy, **options)
    assert answers_and_hits(llm)[1] == 0
    closed(llm)


def test_salts_never_meet(tmp_path, make_llm):
    llm = make_llm(**tiers(tmp_path))
    answers_and_hits(llm, salt="a")
    closed(llm)
    llm = make_llm(**tiers(tmp_path))
    assert answers_and_hits(llm, salt="")[1] == 0
    assert answers_and_hits(llm)[1] == 0
    assert answers_and_hits(llm, salt="a")[1] >= 0.95 * FULL_BLOCKS
    closed(llm)


def test_a_hash_function_that_collides(tmp_path, make_llm):
    """Digests of one byte of information: most blocks meet others under theirs."""
    plain, _ = answers_and_hits(make_llm())
    for _ in range(3):
        llm = make_llm(**tiers(tmp_path))
        llm.engine.memory._hashing._function = lambda message: sha256(message)[:1] * 32
        found, _ = answers_and_hits(llm)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
        closed(llm)


@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort", "race"])
def test_every_load_policy(policy, tmp_path, make_llm):
    plain, _ = answers_and_hits(make_llm())
    for number in range(2):
        llm = make_llm(**tiers(tmp_path, kv_load_policy=policy))
        found, hits = answers_and_hits(llm)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
        if number and policy == "wait_complete":
            assert hits >= 0.95 * FULL_BLOCKS
        closed(llm)


@pytest.mark.parametrize("number", [5, 28, None])  # EIO, ENOSPC, short
@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_disk_that_fails_now_and_then(number, every, tmp_path, make_llm):
    plain, _ = answers_and_hits(make_llm())
    for _ in range(2):
        llm = make_llm(**tiers(tmp_path))
        llm.engine.tiers.disk.file.io = Failing(number, every)
        found, _ = answers_and_hits(llm)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
        llm.engine.tiers.disk.file.io = FileIO()
        closed(llm)


def test_an_abort_while_its_prefix_is_loaded(tmp_path, make_llm):
    first = make_llm(**tiers(tmp_path))
    plain, _ = answers_and_hits(first)
    closed(first)
    llm = make_llm(**tiers(tmp_path))
    engine = llm.engine
    engine.add_request("gone", PROMPTS[2], PARAMS)
    engine.abort("gone")
    engine.memory.check()
    found, _ = answers_and_hits(llm)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
    closed(llm)
    assert engine.memory.offload.host.pool.num_in_use == 0


def test_a_compressed_request_hits_and_spoils_nothing(tmp_path, make_llm):
    compression = CompressionConfig("knorm", budget=48, interval=16, sinks=2, recent=8)
    expected, _ = answers_and_hits(make_llm(), compression=compression)
    plain, _ = answers_and_hits(make_llm())
    for number in range(2):
        llm = make_llm(**tiers(tmp_path))
        found, _ = answers_and_hits(llm, compression=compression)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        found, _ = answers_and_hits(llm)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain], number
        closed(llm)


WRITER = """
import json, sys, tiny
from kvreclaim import LLM, SamplingParams
directory, disk, seed = sys.argv[1:]
llm = LLM(directory, dtype="float32", device="cpu", num_blocks=200, kv_offloading_size=16e6 / 2**30,
          kv_offloading_disk_path=disk, kv_offloading_disk_size=2e6 / 2**30, kv_load_policy="wait_complete")
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
for round in range(10_000):
    prompts = tiny.prompts((150, 97, 260), seed=int(seed) * 10_000 + round)
    llm.generate(prompts, params)
    print(round, flush=True)
"""


def test_killed_while_it_writes(tmp_path, make_llm, calibrated_dir):
    """SIGKILL at some moment, again and again; every restart goes on with a sound cache within its bound."""
    plain, _ = answers_and_hits(make_llm())
    here = str(Path(tiny.__file__).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    recovered, times = 0, int(os.environ.get("KVRECLAIM_KILLS", "2"))
    for number in range(times):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(calibrated_dir("llama")), str(tmp_path), str(number)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        ) as writer:
            for _ in range(2 + number % 3):
                assert writer.stdout.readline(), "the writer ended by itself"
            writer.kill()
        llm = make_llm(**tiers(tmp_path, kv_offloading_disk_size=2e6 / GIB))
        recovered += llm.engine.tiers.disk.num_recovered
        found, _ = answers_and_hits(llm)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
        closed(llm)
        assert sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()) <= 2_000_000
    assert recovered > 0


def test_two_engines_share_a_directory(tmp_path, make_llm):
    first, second = make_llm(**tiers(tmp_path, kv_offloading_disk_size=4e6 / GIB)), None
    second = make_llm(**tiers(tmp_path, kv_offloading_disk_size=12e6 / GIB))
    plain, _ = answers_and_hits(first)
    found, _ = answers_and_hits(second)
    assert found == plain
    closed(first)
    closed(second)


def test_a_disk_needs_a_host(tmp_path, make_llm):
    with pytest.raises(InvalidArgumentError, match="kv_offloading_size is 0"):
        make_llm(kv_offloading_disk_path=str(tmp_path))
    with pytest.raises(InvalidArgumentError, match="enable_prefix_caching is off"):
        make_llm(**tiers(tmp_path, enable_prefix_caching=False))


def test_a_race_takes_over_what_has_come(tmp_path, make_llm):
    """It begins at once, and goes on behind the blocks that were read while it computed its first chunk."""
    options = tiers(tmp_path, kv_load_policy="race", max_num_batched_tokens=32)
    first = make_llm(**options)
    plain, _ = answers_and_hits(first)
    closed(first)
    llm = make_llm(**options)
    engine, disk = llm.engine, llm.engine.tiers.disk
    disk.file.io = held = Held()
    request = engine.add_request("racer", PROMPTS[2], PARAMS)
    rows = []
    schedule = engine.scheduler.schedule

    def seen():
        plan = schedule()
        rows.extend((row.first, row.num_tokens) for row in plan.rows)
        return plan

    engine.scheduler.schedule = seen
    engine.step()
    held.free.set()
    while disk.tier.num_loading:
        engine.tiers.idle()
        engine.tiers.begin_step()
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
    assert rows[:2] == [(0, 32), (256, 4)]
    assert request.sequences[0].token_ids[len(PROMPTS[2]) :] == list(plain[2][0])
    closed(llm)


def test_a_disk_that_hangs_holds_no_request_up(tmp_path, make_llm):
    """A request waits until kv_load_timeout, then computes; what is loaded after all serves later ones."""
    first = make_llm(**tiers(tmp_path))
    plain, _ = answers_and_hits(first)
    closed(first)
    llm = make_llm(**tiers(tmp_path, kv_load_policy="timeout", kv_load_timeout=0.02))
    disk = llm.engine.tiers.disk
    disk.file.io = held = Held()
    found, hits = answers_and_hits(llm)
    assert hits == 0
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
    held.free.set()
    while disk.tier.num_loading:
        llm.engine.tiers.idle()
        llm.engine.tiers.begin_step()
    closed(llm)
    assert llm.engine.memory.offload.host.pool.num_in_use == 0
