"""Compressed prefixes of models with recurrent layers on the host, on disk and in session files: each has its
state, and a request that begins with it answers as one that computed and compressed its prompt alone."""

from __future__ import annotations

import pytest
import tiny
from disks import tiers
from settings import assert_idle, small, with_options

from kvreclaim import SamplingParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.offload.store.session_file import SessionFile

FAMILIES = ("qwen3-next", "falcon-h1", "lfm2")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
*DOCUMENTS, FIRST, SECOND = tiny.prompts((90, 75, 82, 7, 12), seed=9)
BOTH = ("query_mixture", "shares(kvzap)")


def prompts(question):
    return [
        with_options([document + question], compress_prompt_at=len(document))[0] for document in DOCUMENTS
    ]


def run(llm, batch, policy):
    """Generate one after the other; return the tokens, and the cached tokens of each prompt."""
    outputs = [llm.generate([prompt], GREEDY, small(policy, budget=48, interval=16))[0] for prompt in batch]
    assert [output.error for output in outputs] == [None] * len(outputs)
    llm.engine.memory.check()
    return [output.outputs[0].token_ids for output in outputs], [
        output.metrics.num_cached_tokens for output in outputs
    ]


KNOWN = {}


@pytest.fixture
def expected(make_llm):
    def answers(family, policy, question):
        key = family, policy, len(question)
        if key not in KNOWN:
            alone = make_llm(family, prefix_snapshot_fraction=0.0, enable_prefix_caching=False)
            KNOWN[key] = run(alone, prompts(question), policy)[0]
        return KNOWN[key]

    return answers


LENGTHS = [len(document) for document in DOCUMENTS]


def settled(llm):
    files = llm.engine.tiers.prefixes
    while files.is_busy:
        files.workers.wait(0.1)
        files.poll()


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_move_to_the_host_and_back(family, policy, make_llm, expected):
    """One may be on the device at a time."""
    llm = make_llm(family, state_checkpoints=1, kv_offloading_size=0.02)
    snapshots = llm.engine.scheduler.snapshots
    assert run(llm, prompts(FIRST), policy) == (expected(family, policy, FIRST), [0, 0, 0])
    assert [snapshots.is_parked(one) for one in snapshots] == [True, True, False]
    for _ in range(2):
        assert run(llm, prompts(SECOND), policy) == (expected(family, policy, SECOND), LENGTHS)
        assert sum(not snapshots.is_parked(one) for one in snapshots) <= 1
    together = llm.generate(prompts(SECOND) + prompts(FIRST), GREEDY, small(policy, budget=48, interval=16))
    found = [output.outputs[0].token_ids for output in together]
    assert found == expected(family, policy, SECOND) + expected(family, policy, FIRST)
    llm.engine.reset_prefix_cache()
    llm.engine.step()
    assert_idle(llm)
    recurrent = llm.engine.memory.recurrent
    assert recurrent.num_used == recurrent.num_checkpoints
    assert llm.engine.memory.offload.states.slots.num_free == llm.engine.memory.offload.states.slots.num_slots


def test_without_room_for_its_state_none_goes_to_the_host(make_llm, expected):
    facts = make_llm("lfm2").engine.loaded.facts
    fraction = 3.5 * facts.state_bytes / (0.02 * 2**30)
    llm = make_llm(
        "lfm2", state_checkpoints=1, kv_offloading_size=0.02, kv_offloading_state_fraction=fraction
    )
    snapshots = llm.engine.scheduler.snapshots
    run(llm, prompts(FIRST), "knorm")
    assert [snapshots.is_parked(one) for one in snapshots] in ([True, True, False], [True, False])
    assert run(llm, prompts(SECOND), "knorm")[0] == expected("lfm2", "knorm", SECOND)


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_restart(family, policy, tmp_path, make_llm, expected):
    options = tiers(tmp_path, kv_offloading_size=0.02, kv_offloading_disk_size=0.1)
    first = make_llm(family, **options)
    run(first, prompts(FIRST), policy)
    settled(first)
    first.close()
    llm = make_llm(family, **options)
    assert run(llm, prompts(SECOND), policy) == (expected(family, policy, SECOND), LENGTHS)
    assert llm.engine.tier_stats().prefixes.hits == 3
    llm.close()


@pytest.mark.parametrize("place", ["device", "host", "disk"])
@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_sessions(family, policy, place, tmp_path, make_llm, expected):
    options = {
        "device": {},
        "host": {"state_checkpoints": 1, "kv_offloading_size": 0.02},
        "disk": tiers(tmp_path / "disk", kv_offloading_size=0.02, kv_offloading_disk_size=0.1),
    }[place]
    llm = make_llm(family, **options)
    run(llm, prompts(FIRST), policy)
    if place == "disk":
        settled(llm)
        llm.close()
        llm = make_llm(family, **options)
    path = tmp_path / "a.session"
    (saved,) = with_options([DOCUMENTS[0]], compress_prompt_at=LENGTHS[0])
    assert (
        llm.save_session(saved, path, compression=small(policy, budget=48, interval=16)).num_tokens
        == LENGTHS[0]
    )
    llm.close()
    llm = make_llm(family, num_blocks=150)
    llm.load_session(path)
    llm.engine.memory.check()
    found = run(llm, prompts(SECOND)[:1], policy)
    assert found == (expected(family, policy, SECOND)[:1], LENGTHS[:1])


def test_a_file_without_its_state_is_refused(tmp_path, make_llm):
    llm, path = make_llm("lfm2"), tmp_path / "a.session"
    run(llm, prompts(FIRST)[:1], "knorm")
    (saved,) = with_options([DOCUMENTS[0]], compress_prompt_at=LENGTHS[0])
    llm.save_session(saved, path, compression=small("knorm", budget=48, interval=16))
    file = SessionFile.load(path, llm.engine.sessions.fields)
    for state in (None, file.tensors["recurrent"][:-1].contiguous()):
        tensors = {name: tensor for name, tensor in file.tensors.items() if name != "recurrent"}
        SessionFile(file.fields, file.facts, tensors | ({} if state is None else {"recurrent": state})).save(
            path
        )
        with pytest.raises(InvalidArgumentError, match="do not fit"):
            llm.load_session(path)
    file.save(path)
    with pytest.raises(InvalidArgumentError, match="state_checkpoints is 0"):
        make_llm("lfm2", state_checkpoints=0).load_session(path)
