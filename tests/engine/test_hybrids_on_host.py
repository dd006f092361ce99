"""Prefixes of models with recurrent layers that lie on the host with their states: answers are those of
transformers, whatever is found, lost or fails."""

from __future__ import annotations

import pytest
import tiny
from settings import assert_idle

from kvreclaim import LLM, SamplingParams
from kvreclaim.offload.plan.states import HostStates

FEW = ("qwen3-next", "lfm2", "falcon-h1", "jamba")
PROMPTS = tiny.prompts((41, 33, 57, 64), seed=3)
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def load(directory, **options) -> LLM:
    """The pool holds one prompt with its answer, and hardly more."""
    given = {"num_blocks": 11, "block_size": 8, "max_num_seqs": 2, "kv_offloading_size": 0.01, **options}
    return LLM(directory, dtype="float32", device="cpu", **given)


def below(llm: LLM) -> HostStates:
    return llm.engine.memory.offload.states


def run(llm: LLM, prompts) -> tuple[list[list[int]], list[int]]:
    """Generate one after the other; return the tokens, and the cached tokens of each prompt."""
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert_idle(llm)
    found = [output.metrics.num_cached_tokens for output in outputs]
    return [output.outputs[0].token_ids for output in outputs], found


@pytest.fixture(scope="module")
def expected(tiny_dir):
    return tiny.remembered(tiny_dir, PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize("family", FEW)
def test_a_prompt_whose_blocks_were_reused_is_found(family, tiny_dir, expected) -> None:
    llm = load(tiny_dir(family))
    assert run(llm, PROMPTS) == (expected(family), [0] * 4)
    assert run(llm, PROMPTS) == (expected(family), [(len(prompt) - 1) // 8 * 8 for prompt in PROMPTS])
    stats = llm.engine.tier_stats()
    assert stats.host_hit_tokens == sum((len(prompt) - 1) // 8 * 8 for prompt in PROMPTS)
    assert (stats.states.loaded, stats.states.failed) == (4, 0)


@pytest.mark.parametrize("family", FEW)
def test_the_next_turn_is_found(family, tiny_dir, expected) -> None:
    """The state behind the last full block of an answer goes to the host when it ends."""
    llm = load(tiny_dir(family), num_blocks=14)
    run(llm, PROMPTS)
    turns = [prompt + answer for prompt, answer in zip(PROMPTS, expected(family), strict=True)]
    longer = [[*turn, 7, 8, 9] for turn in turns]
    found = run(llm, longer)
    assert found == (expected(family, longer), [(len(turn) - 1) // 8 * 8 for turn in turns])


def test_a_state_that_is_loaded_is_found_on_the_device(tiny_dir, expected) -> None:
    llm = load(tiny_dir("lfm2"))
    run(llm, PROMPTS)
    again = [PROMPTS[0], PROMPTS[0]]
    assert run(llm, again) == (expected("lfm2", again), [40, 40])
    assert below(llm).counts.loaded == 1


def test_a_hit_ends_at_the_deepest_state(tiny_dir, expected) -> None:
    """40 of 48 tokens on the host lie before a state, as another prompt ended there."""
    long = tiny.prompts((64,), seed=6)[0]
    prompts = [long[:41], long, PROMPTS[0], PROMPTS[2], long[:50]]
    llm = load(tiny_dir("qwen3-next"))
    answers, found = run(llm, prompts)
    assert answers == expected("qwen3-next", prompts)
    assert found == [0, 40, 0, 0, 40]


def test_blocks_of_the_device_with_a_state_of_the_host(tiny_dir, expected) -> None:
    llm = load(tiny_dir("falcon-h1"), num_blocks=60, state_checkpoints=1)
    run(llm, PROMPTS)
    assert run(llm, PROMPTS) == (expected("falcon-h1"), [40, 32, 56, 56])
    stats = llm.engine.tier_stats()
    assert stats.host_hit_tokens == 0
    assert stats.states.loaded == 4


def test_the_least_recently_used_state_gives_way(tiny_dir, expected) -> None:
    llm = load(tiny_dir("lfm2"))
    fraction = 3.5 * llm.engine.loaded.facts.state_bytes / (0.01 * 2**30)
    llm = load(tiny_dir("lfm2"), kv_offloading_state_fraction=fraction, kv_offload_decode=False)
    assert below(llm).slots.num_slots == 3
    run(llm, PROMPTS)
    again = [PROMPTS[1], PROMPTS[0], PROMPTS[1]]
    assert run(llm, again) == (expected("lfm2", again), [32, 0, 32])
    assert below(llm).slots.num_live == 3


def test_a_state_goes_with_its_block(tiny_dir, expected) -> None:
    """The host holds fewer blocks than the prompts have."""
    llm = load(tiny_dir("lfm2"))
    facts = llm.engine.loaded.facts
    size = 12 * 16 * sum(2 * layer.num_kv_heads * layer.head_dim for layer in facts.layers) * 4
    size += 16 * facts.state_bytes
    fraction = 16.5 * facts.state_bytes / size
    llm = load(tiny_dir("lfm2"), kv_offloading_size=size / 2**30, kv_offloading_state_fraction=fraction)
    for _ in range(3):
        answers, _ = run(llm, PROMPTS)
        assert answers == expected("lfm2")
    assert llm.engine.tier_stats().host.evictions > 0
    assert below(llm).slots.num_live < below(llm).slots.num_slots


@pytest.mark.parametrize("options", [{"kv_offloading_state_fraction": 0.0}, {"state_checkpoints": 0}])
def test_without_states_nothing_is_stored(options, tiny_dir, expected) -> None:
    llm = load(tiny_dir("lfm2"), **options)
    run(llm, PROMPTS)
    assert run(llm, PROMPTS)[0] == expected("lfm2")
    stats = llm.engine.tier_stats()
    assert (below(llm), stats.host.cached, stats.host_hit_tokens) == (None, 0, 0)


def test_a_share_that_holds_no_state_is_logged(tiny_dir, caplog) -> None:
    llm = load(tiny_dir("lfm2"), kv_offloading_state_fraction=1e-6)
    assert "holds no state" in caplog.text
    assert below(llm) is None


def test_on_the_second_use(tiny_dir, expected) -> None:
    llm = load(tiny_dir("qwen3-next"), kv_offloading_write_policy="write_through_selective")
    run(llm, [PROMPTS[0], PROMPTS[0], PROMPTS[2], PROMPTS[3]])
    again = [PROMPTS[0], PROMPTS[2]]
    assert run(llm, again) == (expected("qwen3-next", again), [40, 0])


@pytest.mark.parametrize("every", [1, 2])
def test_copies_to_the_host_that_fail_lose_hits(every, tiny_dir, expected, monkeypatch) -> None:
    llm = load(tiny_dir("lfm2"))
    failing(monkeypatch, llm, "write_bytes", every)
    for _ in range(2):
        assert run(llm, PROMPTS)[0] == expected("lfm2")
    counts = below(llm).counts
    assert counts.failed > 0
    assert (counts.stored > 0) == (every > 1)
    assert counts.loaded <= counts.stored


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("every", [1, 2])
def test_states_that_cannot_be_loaded_lose_hits(every, family, tiny_dir, expected, monkeypatch) -> None:
    llm = load(tiny_dir(family), num_blocks=20, max_num_seqs=4, max_num_batched_tokens=40)
    run(llm, PROMPTS)
    failing(monkeypatch, llm, "read_bytes", every)
    assert run(llm, PROMPTS[:1])[0] == expected(family)[:1]
    prompts = [*PROMPTS, *PROMPTS]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.error for output in outputs] == [None] * 8
    assert [output.outputs[0].token_ids for output in outputs] == expected(family) * 2
    assert below(llm).counts.failed > 0
    assert_idle(llm)


def failing(monkeypatch, llm: LLM, name: str, every: int) -> None:
    """Make one of so many calls of a store fail when part of the bytes has been moved."""
    ((states,),) = [[feature for feature in llm.engine.extensions.ordered if hasattr(feature, "rows")]]
    store, calls = states.store, [0]
    move = getattr(store, name)

    def moving(slot, row) -> None:
        calls[0] += 1
        if calls[0] % every == 0:
            row[: len(row) // 2] = 77
            raise OSError("no way through")
        move(slot, row)

    monkeypatch.setattr(store, name, moving)


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_beside_prefixes_on_the_host(mode, family, tiny_dir, expected) -> None:
    options = {"num_blocks": 17, "max_num_seqs": 4, "max_num_batched_tokens": 24, "preemption_mode": mode}
    llm = load(tiny_dir(family), **options)
    for _ in range(3):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.error for output in outputs] == [None] * 4
        assert [output.outputs[0].token_ids for output in outputs] == expected(family)
        assert_idle(llm)
    assert sum(llm.engine.totals.preemptions.values()) > 0
    assert below(llm).counts.loaded > 0
