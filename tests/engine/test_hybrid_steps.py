"""Steps over recurrent layers that fail, whose drafts are rejected, that search or score: states are those of
the tokens that stand."""

from __future__ import annotations

import pytest
import tiny
import torch
from breaking import Breaking, break_every_third
from checking import tokens
from settings import assert_idle
from test_beam_search import generated
from test_prompt_logprobs import check, oracle, reporting

from kvreclaim import LLM, BeamSearchParams, SamplingParams
from kvreclaim.engine.speculative import draft_model

FAMILIES = ("qwen3-next", "falcon-h1", "lfm2")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = tiny.prompts((5, 33, 17, 24), seed=3)


@pytest.fixture
def make_hybrid(tiny_dir):
    """(family, **engine arguments) -> an engine without statistics."""

    def make(family, **arguments):
        given = {"num_blocks": 200, "block_size": 8, "max_num_batched_tokens": 32, **arguments}
        return LLM(tiny_dir(family), dtype="float32", device="cpu", **given)

    return make


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_fails_changes_no_state(family, drafts, make_hybrid, tiny_dir):
    """Layers before the last one have written theirs by then; each sequence is computed again alone."""
    expected = tiny.greedy(tiny_dir(family), PROMPTS, 20)
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected, strict=True)}
    guesses = {"num_speculative_tokens": drafts} if drafts else None
    llm = make_hybrid(family, speculative_config=guesses)

    def draft(requested):
        for seq, most in requested:
            right = len(seq.token_ids) % 3
            known = answers[tuple(seq.token_ids[: seq.num_prompt])][seq.num_generated :][:right]
            seq.draft_ids = [*known, *[0] * most][:most]

    if drafts:
        llm.engine.drafter.draft = draft
    breaking = break_every_third(llm)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert breaking.num_raised > 3
    assert_idle(llm)


def test_who_is_guilty_ends_and_leaves_no_state(make_hybrid, tiny_dir):
    llm = make_hybrid("qwen3-next")
    bad = [3, 5, 271]
    good = [[token % 271 for token in prompt] for prompt in PROMPTS]
    Breaking(llm, lambda ids: any(ids[i : i + 3] == bad for i in range(len(ids))))
    outputs = llm.generate([bad, *good], GREEDY)
    assert outputs[0].error == "RuntimeError: boom"
    assert tokens(outputs[1:]) == tiny.greedy(tiny_dir("qwen3-next"), good, 20)
    states = llm.engine.memory.recurrent
    assert states.num_used == states.num_checkpoints
    assert_idle(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_are_those_of_transformers(family, make_hybrid, tiny_dir):
    """They are, also in a pool in which searches preempt each other."""
    search = BeamSearchParams(beam_width=3, max_tokens=12, num_return_sequences=3, ignore_eos=True)
    prompts, model = tiny.prompts((9, 30), seed=4), tiny.load_oracle(tiny_dir(family))
    for num_blocks in (200, 14):
        llm = make_hybrid(family, num_blocks=num_blocks, max_num_seqs=6)
        for prompt, output in zip(prompts, llm.beam_search(prompts, search), strict=True):
            ids, scores = generated(model, prompt, search)
            assert [one.token_ids for one in output.outputs] == ids
            found = [one.sequences_scores for one in output.outputs]
            assert found == pytest.approx(scores, abs=1e-4)
        assert_idle(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_log_probabilities_of_prompts(family, make_hybrid, tiny_dir):
    llm, (prompt, continuation) = make_hybrid(family, max_num_batched_tokens=7), tiny.prompts((33, 9), seed=5)
    output = llm.generate(prompt, reporting(2))[0]
    check(output.prompt_logprobs, prompt, oracle(tiny_dir(family), prompt), 2)
    scores = llm.score([prompt], [continuation])[0]
    rows = oracle(tiny_dir(family), prompt + continuation)[len(prompt) - 1 :]
    wanted = rows[torch.arange(len(continuation)), continuation]
    assert scores.predicted == rows.argmax(-1).tolist()
    assert scores.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_of_one_prompt_that_are_preempted(family, make_hybrid):
    drawn = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=30, ignore_eos=True)
    roomy, tight = make_hybrid(family), make_hybrid(family, num_blocks=12)
    expected, found = (llm.generate([PROMPTS[1]], drawn) for llm in (roomy, tight))
    assert tokens(found) == tokens(expected)
    assert found[0].metrics.preemptions > 0
    assert_idle(tight)


def drafted_by(tiny_dir, model, drafts):
    return {"method": "draft_model", "model": str(tiny_dir(model)), "num_speculative_tokens": drafts}


@pytest.fixture
def confident(monkeypatch):
    """Tiny random models believe little."""
    monkeypatch.setattr(draft_model, "LEAST_CONFIDENCE", 0.0)


PAIRS = [*((one, one) for one in tiny.HYBRIDS), ("qwen3", "lfm2"), ("qwen3-next", "qwen3"), ("lfm2", "jamba")]


@pytest.mark.parametrize(("family", "drafter"), PAIRS)
def test_draft_models(family, drafter, make_hybrid, tiny_dir, confident):
    """The target's own twin drafts the target's tokens; another one is rejected now and then, and goes on
    from the state behind what stands."""
    expected = tiny.greedy(tiny_dir(family), PROMPTS, 20)
    llm = make_hybrid(family, speculative_config=drafted_by(tiny_dir, drafter, 3), max_num_seqs=3)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    counts, cache = llm.engine.totals.speculation, llm.engine.drafter.cache
    assert cache._mirrors == {}
    if cache.states is not None:
        assert cache.states._held == {}
        assert len(cache.states._free) == len(set(cache.states._free)) == 3 * 5
    if family == drafter:
        assert counts.num_draft_tokens == counts.num_accepted_tokens > 0
    assert_idle(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_behind_refused_drafts(family, make_hybrid, tiny_dir, confident):
    """Every third draft is another token than the twin's; what follows is drafted as well as before."""
    expected = tiny.greedy(tiny_dir(family), PROMPTS, 20)
    llm = make_hybrid(family, speculative_config=drafted_by(tiny_dir, family, 4))
    drafter, counts, wrong = llm.engine.drafter, llm.engine.totals.speculation, [0]
    draft = drafter.draft

    def spoilt(requested):
        draft(requested)
        for seq, _ in requested:
            if len(seq.draft_ids) > 1 and len(seq.token_ids) % 3 == 0:
                place = len(seq.token_ids) // 3 % len(seq.draft_ids)
                seq.draft_ids[place] = (seq.draft_ids[place] + 1) % 271
                wrong[0] += 1

    drafter.draft = spoilt
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert wrong[0] > 3
    assert 0 < counts.num_draft_tokens - counts.num_accepted_tokens <= 4 * wrong[0]


def test_sequences_take_turns_where_states_are_few(make_hybrid, tiny_dir, confident):
    prompts = tiny.prompts((9, 12, 20, 7, 15, 30), seed=6)
    llm = make_hybrid("qwen3", speculative_config=drafted_by(tiny_dir, "lfm2", 2), max_num_seqs=6)
    llm.engine.drafter.cache._max_num_seqs = 2
    assert tokens(llm.generate(prompts, GREEDY)) == tiny.greedy(tiny_dir("qwen3"), prompts, 20)
    assert llm.engine.totals.speculation.num_draft_tokens > 0
    assert_idle(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_a_draft_model_that_fail(family, make_hybrid, tiny_dir, confident):
    """Passes over several sequences, when most layers have written; each is computed again alone."""
    llm = make_hybrid(family, speculative_config=drafted_by(tiny_dir, family, 3))
    forward, counted = llm.engine.drafter.cache.runner.forward, [0]

    def failing(items):
        found = forward(items)
        counted[0] += len(items) > 1
        if len(items) > 1 and counted[0] % 3 == 0:
            raise RuntimeError("boom")
        return found

    llm.engine.drafter.cache.runner.forward = failing
    assert tokens(llm.generate(PROMPTS, GREEDY)) == tiny.greedy(tiny_dir(family), PROMPTS, 20)
    counts = llm.engine.totals.speculation
    assert counts.num_draft_tokens == counts.num_accepted_tokens > 0
    assert counted[0] > 6
