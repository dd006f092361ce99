"""Prefixes of models with recurrent layers that lie on disk with their states: answers are those of
transformers, before and after a restart, whatever is damaged, lost or full."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import tiny
from disks import GIB, Failing
from settings import assert_idle
from verifying import drafting

from kvreclaim import LLM, SamplingParams
from kvreclaim.engine.offload.stats import DiskStateStats
from kvreclaim.errors import InvalidArgumentError

FEW = ("qwen3-next", "lfm2", "falcon-h1", "jamba")
PROMPTS = tiny.prompts((41, 33, 57, 64), seed=3)
LENGTHS = [(len(prompt) - 1) // 8 * 8 for prompt in PROMPTS]
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def load(directory, disk, **options) -> LLM:
    """The pool holds one prompt with its answer, and hardly more; the host two or three."""
    given = {
        "num_blocks": 11,
        "block_size": 8,
        "max_num_seqs": 2,
        "kv_offloading_size": 0.01,
        "kv_offloading_disk_path": str(disk),
        "kv_offloading_disk_size": 0.02,
        "kv_load_policy": "wait_complete",
        **options,
    }
    return LLM(directory, dtype="float32", device="cpu", **given)


def settled(llm: LLM) -> DiskStateStats:
    """Wait until pending writes to disk have ended. Returns: the disk's counts of states."""
    tiers = llm.engine.tiers
    tiers.states.flush()
    tiers.submit()
    while tiers.stats().disk.storing or tiers.stats().disk.states.storing:
        for disk in tiers.disks:
            disk.workers.wait(0.1)
    return tiers.stats().disk.states


def run(llm: LLM, prompts) -> tuple[list[list[int]], list[int]]:
    """Generate one after the other; return the tokens, and the cached tokens of each prompt."""
    answers, found = [], []
    for prompt in prompts:
        (output,) = llm.generate([prompt], GREEDY)
        assert output.error is None
        answers.append(output.outputs[0].token_ids)
        found.append(output.metrics.num_cached_tokens)
        settled(llm)
        assert_idle(llm)
    return answers, found


@pytest.fixture(scope="module")
def expected(tiny_dir):
    return tiny.remembered(tiny_dir, PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize("family", FEW)
def test_after_a_restart(family, tiny_dir, expected, tmp_path) -> None:
    first = load(tiny_dir(family), tmp_path)
    assert run(first, PROMPTS) == (expected(family), [0] * 4)
    first.close()
    llm = load(tiny_dir(family), tmp_path)
    assert settled(llm).recovered >= 4
    assert run(llm, PROMPTS) == (expected(family), LENGTHS)
    stats = llm.engine.tier_stats()
    assert stats.disk_hit_tokens == sum(LENGTHS)
    assert (stats.disk.states.loaded, stats.disk.states.gone, stats.states.loaded) == (4, 0, 4)
    llm.close()


@pytest.mark.parametrize("family", FEW)
def test_the_next_turn_after_a_restart(family, tiny_dir, expected, tmp_path) -> None:
    """The state behind the last full block of an answer is written when the engine closes at the latest."""
    first = load(tiny_dir(family), tmp_path, num_blocks=14)
    outputs = [first.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    first.close()
    turns = [[*one.prompt_token_ids, *one.outputs[0].token_ids, 7, 8, 9] for one in outputs]
    llm = load(tiny_dir(family), tmp_path, num_blocks=14)
    assert run(llm, turns) == (expected(family, turns), [(len(turn) - 4) // 8 * 8 for turn in turns])
    llm.close()


def test_a_state_that_the_host_has_lost(tiny_dir, expected, tmp_path) -> None:
    """The host has room for all blocks and one state; the others come from disk, without their blocks."""
    facts = load(tiny_dir("lfm2"), tmp_path / "0").engine.loaded.facts
    fraction = 1.5 * facts.state_bytes / (0.01 * GIB)
    options = {"kv_offloading_state_fraction": fraction, "kv_offload_decode": False}
    llm = load(tiny_dir("lfm2"), tmp_path / "1", kv_offloading_disk_size=0.25, **options)
    run(llm, PROMPTS)
    again = [PROMPTS[2], PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    found = run(llm, again)
    assert found == (expected("lfm2", again), [LENGTHS[2], LENGTHS[0], LENGTHS[2], LENGTHS[1]])
    assert llm.engine.tier_stats().disk.states.loaded == 4
    assert llm.engine.memory.offload.states.slots.num_live == 1
    llm.close()


def test_a_disk_that_holds_few_states(tiny_dir, expected, tmp_path) -> None:
    """The least recently used gives way; what is found is right."""
    facts = load(tiny_dir("lfm2"), tmp_path / "0").engine.loaded.facts
    slot = -(-facts.state_bytes // 4096) * 4096 + 4096 + 1000
    size = 2**25
    fraction = 2.3 * slot / (size * 0.75)
    options = {"kv_offloading_disk_size": size / GIB, "kv_offload_decode": False}
    first = load(tiny_dir("lfm2"), tmp_path / "1", **options)
    first.close()
    options["kv_offloading_state_fraction"] = fraction
    first = load(tiny_dir("lfm2"), tmp_path / "2", **options)
    assert settled(first).num_slots == 2
    run(first, PROMPTS)
    assert settled(first).kept == 2
    first.close()
    llm = load(tiny_dir("lfm2"), tmp_path / "2", **options)
    assert settled(llm).recovered == 2
    answers, found = run(llm, [PROMPTS[3], PROMPTS[2], PROMPTS[0]])
    assert answers == [expected("lfm2")[i] for i in (3, 2, 0)]
    assert found[2] == 0
    assert found[0] > 0
    llm.close()


def flip(path: Path, step: int) -> None:
    """Change one byte in so many."""
    data = bytearray(path.read_bytes())
    for place in range(step // 2, len(data), step):
        data[place] ^= 0x41
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["states/*/slots.kv", "*/slots.kv"])
@pytest.mark.parametrize("family", FEW)
def test_damaged_bytes_lose_hits(family, name, tiny_dir, expected, tmp_path) -> None:
    first = load(tiny_dir(family), tmp_path)
    run(first, PROMPTS)
    first.close()
    (path,) = [found for found in tmp_path.glob(name) if ("states" in found.parts) == ("states" in name)]
    flip(path, 3000)
    llm = load(tiny_dir(family), tmp_path)
    for _ in range(2):
        assert run(llm, PROMPTS)[0] == expected(family)
    stats = llm.engine.tier_stats().disk
    assert (stats.states.gone > 0) == ("states" in name)
    assert (stats.gone > 0) == ("states" not in name)
    llm.close()


def test_without_the_file_of_states_nothing_is_found(tiny_dir, expected, tmp_path) -> None:
    first = load(tiny_dir("lfm2"), tmp_path)
    run(first, PROMPTS)
    first.close()
    for path in tmp_path.glob("states/*/slots*"):
        path.unlink()
    llm = load(tiny_dir("lfm2"), tmp_path)
    assert settled(llm).recovered == 0
    assert run(llm, PROMPTS) == (expected("lfm2"), [0] * 4)
    llm.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, None])
@pytest.mark.parametrize("every", [1, 4])
def test_a_disk_that_fails_loses_hits(number, every, tiny_dir, expected, tmp_path) -> None:
    llm = load(tiny_dir("qwen3-next"), tmp_path, kv_offloading_size=0.001)
    for disk in llm.engine.tiers.disks:
        disk.file.io = Failing(number, every)
    for _ in range(2):
        assert run(llm, PROMPTS)[0] == expected("qwen3-next")
    assert settled(llm).failed > 0
    llm.close()


@pytest.mark.parametrize("policy", ["timeout", "best_effort", "race", "wait_complete"])
@pytest.mark.parametrize("family", FEW)
def test_many_at_once(family, policy, tiny_dir, expected, tmp_path) -> None:
    first = load(tiny_dir(family), tmp_path)
    run(first, PROMPTS)
    first.close()
    options = {"num_blocks": 17, "max_num_seqs": 4, "kv_load_policy": policy, "max_num_batched_tokens": 24}
    llm = load(tiny_dir(family), tmp_path, kv_offloading_size=0.002, **options)
    for _ in range(3):
        outputs = llm.generate([*PROMPTS, *PROMPTS], GREEDY)
        assert [output.error for output in outputs] == [None] * 8
        assert [output.outputs[0].token_ids for output in outputs] == expected(family) * 2
        settled(llm)
        assert_idle(llm)
    if policy == "wait_complete":
        assert settled(llm).loaded > 0
    llm.close()


@pytest.mark.parametrize("family", FEW)
def test_beside_drafts_of_compressed_caches(family, tiny_dir, tmp_path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    answers = tiny.greedy(tiny_dir(family), PROMPTS, 40)
    for name in ("first", "second"):
        llm = load(tiny_dir(family), tmp_path, num_blocks=100, max_num_seqs=4, state_drafts=4)
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params, drafting("knorm"))
            assert [output.error for output in outputs] == [None] * 4
            assert [output.outputs[0].token_ids for output in outputs] == answers
            settled(llm)
            assert_idle(llm)
            llm.engine.reset_prefix_cache(external=False)
        stats = llm.engine.tier_stats()
        assert llm.engine.totals.speculation.num_draft_tokens > 0
        assert stats.states.loaded >= 4
        assert (stats.disk.states.loaded > 0) == (name == "second")
        llm.close()


def test_a_cache_that_was_reset_finds_nothing(tiny_dir, expected, tmp_path) -> None:
    first = load(tiny_dir("lfm2"), tmp_path)
    run(first, PROMPTS)
    first.engine.reset_prefix_cache()
    assert (settled(first).kept, settled(first).num_slots > 4) == (0, True)
    assert run(first, PROMPTS) == (expected("lfm2"), [0] * 4)
    first.engine.reset_prefix_cache()
    while first.engine.tiers.is_clearing:
        pass
    first.close()
    llm = load(tiny_dir("lfm2"), tmp_path)
    assert settled(llm).recovered == 0
    assert run(llm, PROMPTS) == (expected("lfm2"), [0] * 4)
    llm.close()


def test_files_stay_within_the_size(tiny_dir, tmp_path) -> None:
    for _ in range(3):
        llm = load(tiny_dir("lfm2"), tmp_path)
        run(llm, PROMPTS[:1])
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 0.02 * GIB
        num_slots = settled(llm).num_slots, llm.engine.tier_stats().disk.slots.num_slots
        llm.close()
        assert num_slots > (4, 100)


@pytest.mark.parametrize("options", [{"kv_offloading_state_fraction": 1e-6}, {"state_checkpoints": 0}])
def test_a_disk_that_could_hold_no_state_is_refused(options, tiny_dir, tmp_path) -> None:
    with pytest.raises(InvalidArgumentError, match="states of recurrent layers"):
        load(tiny_dir("lfm2"), tmp_path, **options)
