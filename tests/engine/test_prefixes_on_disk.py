"""A document is compressed once; a request about it after a restart gets the answers of an engine that
compressed it by itself, bit for bit, and a file that is not whole is never used."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from disks import GIB, Failing, Held, tiers
from settings import with_options

from kvreclaim import CompressionConfig, SamplingParams

DOCUMENT, *QUESTIONS = tiny.prompts((150, 7, 12), seed=9)
PROMPTS = [DOCUMENT + question for question in QUESTIONS]
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
POLICIES = (
    "query_mixture",
    "knorm",
    "snapkv(window=3)",
    "h2o",
    "kvzap",
    "shares(kvzap)",
    "shares(streaming_llm, by=static)",
    "paged_eviction",
    "random",
    "kvzip",
    "r_kv",
)


def alone(**options):
    return {"prefix_snapshot_fraction": 0.0, "enable_prefix_caching": False} | options


def config(policy="knorm", **fields):
    return CompressionConfig(policy, **{"budget": 32, "interval": 16, "sinks": 2, "recent": 4, **fields})


def ask(llm, prompt, compression=None, params=PARAMS, at=None, salt=None):
    """Tokens and log-probabilities, and the request's figures."""
    at = len(DOCUMENT) if at is None else at
    (output,) = llm.generate(
        with_options([prompt], compress_prompt_at=at, cache_salt=salt), params, compression or config()
    )
    assert output.error is None
    one = output.outputs[0]
    logprobs = [entry.logprob for entries in one.logprobs or () for entry in entries.values()]
    llm.engine.memory.check()
    return (one.token_ids, logprobs), output.metrics


def counters(llm):
    return llm.engine.tier_stats().prefixes.counters


def settled(llm):
    """Wait until pending writes to disk have ended."""
    prefixes = llm.engine.tiers.prefixes
    while prefixes.is_busy:
        prefixes.workers.wait(0.1)
        prefixes.poll()


def filled(directory, make_llm, compression=None, **options):
    """A directory with the file of DOCUMENT, made by an engine that is gone. Returns: its answer."""
    llm = make_llm(**tiers(directory, **options))
    answer, metrics = ask(llm, PROMPTS[0], compression)
    assert metrics.num_cached_tokens == 0
    llm.close()
    assert len(files(directory)) == 1
    return answer


def files(directory):
    return sorted(Path(directory).rglob("*.prefix"))


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy, kernels, tmp_path, make_llm):
    compression = config(policy, budget=48)
    oracle = make_llm(**alone(kernels=kernels))
    expected = [ask(oracle, prompt, compression)[0] for prompt in PROMPTS]
    assert filled(tmp_path, make_llm, compression, kernels=kernels) == expected[0]
    llm = make_llm(**tiers(tmp_path, kernels=kernels, num_blocks=180))
    answer, metrics = ask(llm, PROMPTS[1], compression)
    assert answer == expected[1]
    assert metrics.num_cached_tokens == metrics.num_disk_tokens == len(DOCUMENT)
    again, metrics = ask(llm, PROMPTS[0], compression)
    assert again == expected[0]
    assert (metrics.num_cached_tokens, metrics.num_disk_tokens) == (len(DOCUMENT), 0)
    assert counters(llm).loads == 1
    llm.close()


@pytest.mark.parametrize("form", ["bf16", "fp8_e4m3", "int8", "int4", "turboquant4", "int8+int4"])
@pytest.mark.parametrize("policy", ["knorm", "shares(streaming_llm, by=static)"])
def test_every_format(form, policy, tmp_path, make_llm):
    compression = config(policy)
    oracle = make_llm(**alone(kv_cache_dtype=form))
    expected = [ask(oracle, prompt, compression)[0] for prompt in PROMPTS]
    assert filled(tmp_path, make_llm, compression, kv_cache_dtype=form)[0] == expected[0][0]
    llm = make_llm(**tiers(tmp_path, kv_cache_dtype=form))
    (tokens, _), metrics = ask(llm, PROMPTS[1], compression)
    assert tokens == expected[1][0]
    assert metrics.num_disk_tokens == len(DOCUMENT)
    llm.close()


ASKER = """
import json, sys, tiny
from kvreclaim import LLM, CompressionConfig, SamplingParams
directory, disk, size = sys.argv[1:]
document, *questions = tiny.prompts((150, 7, 12), seed=9)
llm = LLM(directory, dtype="float32", device="cpu", num_blocks=200, kv_offloading_size=16e6 / 2**30,
          kv_offloading_disk_path=disk, kv_offloading_disk_size=float(size), kv_load_policy="wait_complete")
params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
compression = CompressionConfig("knorm", budget=32, interval=16, sinks=2, recent=4)
prompt = {"prompt_token_ids": document + questions[1], "compress_prompt_at": len(document)}
(output,) = llm.generate(prompt, params, compression)
llm.close()
print(json.dumps([output.outputs[0].token_ids, output.metrics.num_disk_tokens]))
"""


def test_another_process_finds_it(tmp_path, make_llm, calibrated_dir):
    expected, _ = ask(make_llm(**alone()), PROMPTS[1])
    filled(tmp_path, make_llm)
    process = subprocess.run(
        [sys.executable, "-c", ASKER, str(calibrated_dir("llama")), str(tmp_path), str(32e6 / GIB)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"},
    )
    assert json.loads(process.stdout) == [list(expected[0]), len(DOCUMENT)]


def test_damage_is_a_miss(tmp_path, make_llm):
    """A flipped bit in each of 64 bytes, spread over the file and dense in its header, and short files."""
    expected = [ask(make_llm(**alone()), prompt)[0] for prompt in PROMPTS]
    filled(tmp_path, make_llm)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(0, 8), *range(8, header, header // 40), *range(header, len(whole), len(whole) // 16)]
    damaged = [(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]) for at in places]
    damaged += [whole[:length] for length in (0, 5, header, len(whole) // 2, len(whole) - 1)]
    for number, content in enumerate([*damaged, whole + b"\0"]):
        path.write_bytes(content)
        llm = make_llm(**tiers(tmp_path, kv_load_policy="timeout"))
        answer, metrics = ask(llm, PROMPTS[1])
        assert answer[0] == expected[1][0]
        assert metrics.num_disk_tokens < len(DOCUMENT), number
        assert (counters(llm).corrupt, counters(llm).loads) == (1, 0), number
        settled(llm)
        llm.close()
        assert path.read_bytes() != content, "it is written anew"


def test_a_foreign_file_under_its_name(tmp_path, make_llm):
    """A whole file of other tokens, of another compression, or of another salt."""
    expected, _ = ask(make_llm(**alone()), PROMPTS[1])
    filled(tmp_path, make_llm)
    (path,) = files(tmp_path)
    others = (
        ([DOCUMENT[0] ^ 1, *PROMPTS[0][1:]], config(), None),
        (PROMPTS[0], config(budget=48), None),
        (PROMPTS[0], config("knorm", sinks=3), None),
        (PROMPTS[0], config(), "red"),
    )
    for prompt, compression, salt in others:
        llm = make_llm(**tiers(tmp_path))
        ask(llm, prompt, compression, salt=salt)
        assert counters(llm).loads == 0
        llm.close()
        (other,) = set(files(tmp_path)) - {path}
        other.replace(path)
        llm = make_llm(**tiers(tmp_path))
        answer, _ = ask(llm, PROMPTS[1])
        assert answer[0] == expected[0]
        assert (counters(llm).corrupt, counters(llm).loads) == (1, 0)
        settled(llm)
        llm.close()


def test_what_differs_finds_nothing(tmp_path, make_llm):
    filled(tmp_path, make_llm, kernels="native")
    for change in (
        {"kv_cache_dtype": "bf16"},
        {"block_size": 32},
        {"kernels": "reference"},
        {"family": "qwen3"},
        {"max_num_batched_tokens": 128},
    ):
        llm = make_llm(**tiers(tmp_path, **({"kernels": "native"} | change)))
        _, metrics = ask(llm, PROMPTS[1])
        assert metrics.num_cached_tokens < len(DOCUMENT)
        assert counters(llm).loads == 0
        llm.close()


def test_salts_never_meet(tmp_path, make_llm):
    llm = make_llm(**tiers(tmp_path))
    ask(llm, PROMPTS[0], salt="red")
    llm.close()
    (path,) = files(tmp_path)
    assert b"red" not in path.read_bytes()
    llm = make_llm(**tiers(tmp_path))
    for salt, found in ((None, 0), ("", 0), ("green", 0), ("red", len(DOCUMENT))):
        assert ask(llm, PROMPTS[1], salt=salt)[1].num_disk_tokens == found
    llm.close()


@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort", "race"])
def test_every_load_policy(policy, tmp_path, make_llm):
    expected = [ask(make_llm(**alone()), prompt)[0] for prompt in PROMPTS]
    filled(tmp_path, make_llm)
    llm = make_llm(**tiers(tmp_path, kv_load_policy=policy))
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert ask(llm, prompt)[0][0] == answer[0]
    if policy in ("wait_complete", "timeout"):
        assert llm.engine.tier_stats().prefixes.hits == 1
    llm.close()


def test_a_disk_that_hangs_holds_no_request_up(tmp_path, make_llm):
    """A request waits until kv_load_timeout; what is loaded after all lies on the host for the next one."""
    expected = [ask(make_llm(**alone()), prompt)[0] for prompt in PROMPTS]
    filled(tmp_path, make_llm)
    llm = make_llm(**tiers(tmp_path, kv_load_policy="timeout", kv_load_timeout=0.02))
    prefixes = llm.engine.tiers.prefixes
    prefixes.files.io = held = Held()
    answer, metrics = ask(llm, PROMPTS[1])
    assert answer[0] == expected[1][0]
    assert metrics.num_disk_tokens == 0
    llm.engine.reset_prefix_cache(external=False)
    llm.engine.add_request(
        "gone", PROMPTS[0], PARAMS, llm.compressor(config()), compress_prompt_at=len(DOCUMENT)
    )
    llm.engine.abort("gone")
    held.free.set()
    while prefixes.below.num_coming:
        llm.engine.tiers.idle()
        llm.engine.tiers.begin_step()
    answer, metrics = ask(llm, PROMPTS[0])
    assert answer[0] == expected[0][0]
    assert metrics.num_disk_tokens == len(DOCUMENT)
    llm.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, None])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_a_disk_that_fails_now_and_then(number, every, tmp_path, make_llm):
    expected = [ask(make_llm(**alone()), prompt)[0] for prompt in PROMPTS]
    for _ in range(3):
        llm = make_llm(**tiers(tmp_path))
        llm.engine.tiers.prefixes.files.io = Failing(number, every)
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert ask(llm, prompt)[0][0] == answer[0]
            settled(llm)
        llm.close()
        assert not [path for path in tmp_path.rglob(".*") if path.is_file()], "half of a file is left"
    if every == 1 and number is not None:
        assert not files(tmp_path)


def test_the_size_is_a_bound(tmp_path, make_llm):
    """The size bounds slots and prefixes together; what was used last stays."""
    size = 1_500_000
    options = tiers(tmp_path, kv_offloading_disk_size=size / GIB, prefix_snapshot_fraction=0.1)
    llm = make_llm(**options)
    prompts = [tiny.prompts((150,), seed=seed)[0] for seed in range(12)]
    for prompt in prompts:
        ask(llm, [*prompt, 5, 6, 7])
        settled(llm)
        used = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(used) <= size
        assert sum(path.stat().st_size for path in files(tmp_path)) <= size // 10
    assert 1 <= len(files(tmp_path)) < 12
    assert counters(llm).removed == counters(llm).stores - len(files(tmp_path)) > 0
    assert llm.engine.tier_stats().prefixes.files == len(files(tmp_path))
    llm.close()
    llm = make_llm(**options)
    ask(llm, [*prompts[-1], 8, 9])
    assert llm.engine.tier_stats().prefixes.hits == 1
    llm.close()
    llm = make_llm(**options | {"prefix_snapshot_fraction": 0.0})
    assert llm.engine.tiers.prefixes is None
    llm.close()


def test_another_process_takes_it_away(tmp_path, make_llm):
    expected, _ = ask(make_llm(**alone()), PROMPTS[1])
    filled(tmp_path, make_llm)
    llm = make_llm(**tiers(tmp_path))
    other = make_llm(**tiers(tmp_path, kv_offloading_disk_size=64e6 / GIB))
    other.engine.reset_prefix_cache()
    while other.engine.tiers.is_clearing:
        other.engine.tiers.prefixes.workers.wait(0.01)
    assert not files(tmp_path)
    answer, metrics = ask(llm, PROMPTS[1])
    assert answer[0] == expected[0]
    assert metrics.num_disk_tokens < len(DOCUMENT)
    assert (counters(llm).lost, counters(llm).corrupt) == (1, 0)
    other.close()
    llm.close()


def test_a_reset_is_for_good(tmp_path, make_llm):
    llm = make_llm(**tiers(tmp_path))
    ask(llm, PROMPTS[0])
    llm.engine.reset_prefix_cache(external=True)
    while llm.engine.tiers.is_clearing:
        llm.engine.tiers.prefixes.workers.wait(0.01)
    assert not files(tmp_path)
    assert ask(llm, PROMPTS[1])[1].num_cached_tokens == 0
    settled(llm)
    llm.engine.reset_prefix_cache(external=False)
    llm.engine.step()
    assert ask(llm, PROMPTS[1])[1].num_disk_tokens == len(DOCUMENT)
    llm.close()


def test_a_small_host_and_a_small_pool(tmp_path, make_llm):
    """Snapshots take turns on device, host and disk; no answer changes."""
    documents = [tiny.prompts((150,), seed=seed)[0] for seed in range(5)]
    oracle = make_llm(**alone())
    options = {"num_blocks": 24, "kv_offloading_size": 0.3e6 / GIB, "prefix_snapshot_fraction": 0.3}
    llm = make_llm(**tiers(tmp_path, **options))
    for turn in range(3):
        for number, document in enumerate(documents):
            prompt = [*document, 5 + turn, 6]
            answer, _ = ask(llm, prompt, at=len(document))
            settled(llm)
            assert answer[0] == ask(oracle, prompt, at=len(document))[0][0], (turn, number)
    assert llm.engine.tier_stats().prefixes.hits > 0
    llm.close()


def test_selective_writes_wait_for_the_second_time(tmp_path, make_llm):
    llm = make_llm(**tiers(tmp_path, kv_offloading_disk_write_policy="write_through_selective"))
    ask(llm, PROMPTS[0])
    settled(llm)
    assert not files(tmp_path)
    ask(llm, PROMPTS[1])
    settled(llm)
    assert len(files(tmp_path)) == 1
    llm.close()
