"""Models with recurrent layers, however they are batched, chunked, preempted, cached or forked, answer as
transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from checking import first_tokens as tokens

from kvreclaim import LLM, SamplingParams
from kvreclaim.engine.request.request import Sequence

PROMPTS = tiny.prompts((5, 33, 17, 1, 64), seed=3)
MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
FEW = ("qwen3-next", "lfm2", "falcon-h1", "jamba")
"""One for each kind of state: a delta rule, a convolution alone, an SSM beside attention, one that gets no
keyword arguments."""
Expected = Callable[[str], list[list[int]]]


@pytest.fixture(scope="module")
def expected(tiny_dir: Callable[[str], Path]) -> Expected:
    """family -> the tokens that generate() gives for PROMPTS."""
    return tiny.remembered(tiny_dir, PROMPTS, MAX_TOKENS)


def load(directory: Path, **limits) -> LLM:
    given = {"num_blocks": 200, "block_size": 8, "max_num_seqs": 8, **limits}
    return LLM(directory, dtype="float32", device="cpu", **given)


def check_pool(llm: LLM) -> None:
    """Nothing is held when nothing runs but checkpoints, and the books are in order."""
    memory = llm.engine.memory
    memory.check()
    assert memory.pool.num_in_use == 0
    assert memory.recurrent.num_used == memory.recurrent.num_checkpoints


@pytest.mark.parametrize("family", tiny.HYBRIDS)
def test_a_batch_in_small_chunks_equals_generate(family, tiny_dir, expected: Expected) -> None:
    llm = load(tiny_dir(family), max_num_batched_tokens=21)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected(family)
    check_pool(llm)


@pytest.mark.parametrize("family", FEW)
def test_preemption_changes_nothing(family, tiny_dir, expected: Expected) -> None:
    llm = load(tiny_dir(family), num_blocks=17, max_num_batched_tokens=32)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == expected(family)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    check_pool(llm)


@pytest.mark.parametrize("family", FEW)
def test_swapped_states_come_back(family, tiny_dir, expected: Expected) -> None:
    llm = load(
        tiny_dir(family),
        num_blocks=17,
        max_num_batched_tokens=32,
        kv_offloading_size=0.01,
        preemption_mode="swap",
    )
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected(family)
    assert llm.engine.totals.swaps > 0
    check_pool(llm)


@pytest.mark.parametrize("family", FEW)
def test_a_next_turn_begins_behind_the_last_full_block(family, tiny_dir, expected: Expected) -> None:
    llm = load(tiny_dir(family), state_checkpoints=16)
    first = llm.generate(PROMPTS, GREEDY)
    turns = [prompt + answer for prompt, answer in zip(PROMPTS, expected(family), strict=True)]
    longer = [[*turn, 7, 8, 9] for turn in turns]
    rest = llm.generate(longer, GREEDY)
    assert tokens(first) == expected(family)
    assert tokens(rest) == tiny.greedy(tiny_dir(family), longer, MAX_TOKENS)
    hits = [output.metrics.num_cached_tokens for output in rest]
    assert hits == [(len(turn) - 1) // 8 * 8 for turn in turns]  # the last token drawn is not computed
    check_pool(llm)


def test_prompts_that_part_are_hit_from_the_third_on(tiny_dir) -> None:
    """The second one shows where a checkpoint is worth its slot."""
    common, tails = tiny.prompts((40,), seed=6)[0], tiny.prompts((9, 11, 13), seed=7)
    prompts = [common + tail for tail in tails]
    llm = load(tiny_dir("qwen3-next"))
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert tokens(outputs) == tiny.greedy(tiny_dir("qwen3-next"), prompts, MAX_TOKENS)
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 0, 40]


def test_checkpoints_every_interval(tiny_dir) -> None:
    common, tails = tiny.prompts((40,), seed=6)[0], tiny.prompts((9, 11), seed=7)
    llm = load(tiny_dir("lfm2"), state_checkpoint_interval=16)
    outputs = [llm.generate([common + tail], GREEDY)[0] for tail in tails]
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 32]
    assert tokens(outputs) == tiny.greedy(tiny_dir("lfm2"), [common + tail for tail in tails], MAX_TOKENS)


def test_without_checkpoints_nothing_is_hit(tiny_dir, expected: Expected) -> None:
    llm = load(tiny_dir("lfm2"), state_checkpoints=0)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert tokens(outputs) == expected("lfm2")
        assert [output.metrics.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
    assert llm.engine.memory.recurrent.num_used == 0


@pytest.mark.parametrize("family", FEW)
def test_several_outputs_share_a_state_until_they_go_on(family, tiny_dir) -> None:
    drawn = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=12, ignore_eos=True)
    llm = load(tiny_dir(family))
    alone = load(tiny_dir(family), max_num_seqs=3, enable_prefix_caching=False)
    both = [each.generate([PROMPTS[1]], drawn)[0] for each in (llm, alone)]
    found = [[one.token_ids for one in output.outputs] for output in both]
    assert found[0] == found[1]
    assert len({tuple(one) for one in found[0]}) == 3
    prompts = [PROMPTS[1] + one[:6] for one in found[0]]
    scores = load(tiny_dir(family)).score(prompts, [one[6:] for one in found[0]])
    assert all(score.error is None for score in scores)
    check_pool(llm)


@pytest.mark.parametrize("family", FEW)
def test_drafts_change_nothing(family, tiny_dir, expected: Expected) -> None:
    """Some drafts of a row stand and some do not: the state behind the last one that stands goes on."""
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected(family), strict=True)}

    def draft(requested: list[tuple[Sequence, int]]) -> None:
        for seq, most in requested:
            drawn, right = seq.num_generated, len(seq.token_ids) % 4
            known = answers[tuple(seq.token_ids[: seq.num_prompt])][drawn : drawn + right]
            seq.draft_ids = [*known, *[0] * most][:most]

    llm = load(tiny_dir(family), speculative_config={"num_speculative_tokens": 4})
    llm.engine.drafter.draft = draft
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected(family)
    counts = llm.engine.totals.speculation
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    check_pool(llm)
