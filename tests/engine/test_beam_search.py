"""Beam search: transformers' ids and scores, over blocks that beams share."""

from __future__ import annotations

import itertools

import pytest
import tiny
import torch
from settings import MOVING, assert_idle, small

from kvreclaim import LLM, BeamSearchParams, SamplingParams
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.registry import make_policy, policy_names
from kvreclaim.engine.sampling.beam_search import BeamSearch
from kvreclaim.errors import InvalidArgumentError, RequestTooLongError
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

TRIGRAMS = torch.tensor(
    [[0.25, 0.25, 0.25, 0.25], [0.11, 0.29, 0.41, 0.19], [0.37, 0.23, 0.06, 0.34], [0.05, 0.52, 0.26, 0.17]]
)
EARLY = (False, True, "never")


def search(width, max_tokens, **how):
    """Search a model whose next token depends on its last one, behind token 1; token 0 ends an output."""
    params = BeamSearchParams(
        beam_width=width, max_tokens=max_tokens, num_return_sequences=min(2, width), **how
    )
    beams = BeamSearch(params, max_tokens, frozenset([0]))
    last = [1] * width
    while chosen := beams.step(TRIGRAMS[last].log()):
        last = [token for _, token in chosen]
    return [(found.token_ids, pytest.approx(found.score, abs=1e-6)) for found in beams.best()]


@pytest.mark.parametrize("early", [False, "never"])
def test_a_search_finds_what_was_worked_out_by_hand(early):
    assert search(2, 4, early_stopping=early) == [((2, 3, 1, 2), -0.878983), ((2, 0), -0.942925)]


def test_a_search_that_stops_early_finds_less():
    assert search(2, 4, early_stopping=True) == [((2, 0), -0.942925), ((1, 2, 0), -1.041242)]
    assert search(3, 3, early_stopping=True)[0] == ((2, 3, 1), -0.874778)


def test_the_length_penalty_decides_between_short_and_long():
    assert search(2, 4, length_penalty=0.0) == [((2, 0), -1.885850), ((1, 2, 0), -3.123725)]
    assert search(2, 4, length_penalty=2.0)[0] == ((2, 3, 1, 2), -0.219746)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def ending_dir(request, tmp_path_factory):
    """The directory of a model that often draws one of several tokens that end an output."""
    return tiny.save_model(
        request.param, tmp_path_factory.mktemp("ending"), eos_token_id=[7, 100, 30], vocab_size=128
    )


def generated(model, prompt, params):
    """transformers' ids and scores."""
    ends = None if params.ignore_eos else [7, 100, 30]
    model.generation_config.eos_token_id = ends  # which generate falls back on
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),  # or pad tokens of the prompt are hidden
        num_beams=params.beam_width,
        max_new_tokens=params.max_tokens,
        early_stopping=params.early_stopping,
        length_penalty=params.length_penalty,
        num_return_sequences=params.num_return_sequences,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=ends,
        pad_token_id=0,
    )
    return out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist()


def test_ids_and_scores_are_those_of_transformers(ending_dir):
    """Many settings at once in one engine, which schedules them as it likes."""
    model = tiny.load_oracle(ending_dir)
    llm = LLM(ending_dir, dtype="float32", device="cpu", num_blocks=60, block_size=16, max_num_seqs=24)
    settings = [
        BeamSearchParams(
            beam_width=width,
            max_tokens=12,
            early_stopping=early,
            length_penalty=penalty,
            num_return_sequences=min(3, width),
            ignore_eos=penalty == 0.0,
        )
        for width, early, penalty in itertools.product((2, 4, 8), EARLY, (1.0, 0.0, -1.0, 2.0))
    ]
    prompts = [[token % 128 for token in each] for each in tiny.prompts(range(3, 3 + len(settings)), seed=4)]
    outputs = llm.beam_search(prompts, settings)
    ended = 0
    for prompt, params, output in zip(prompts, settings, outputs, strict=True):
        ids, scores = generated(model, prompt, params)
        assert len(output.outputs) == params.num_return_sequences
        for found, want, score in zip(output.outputs, ids, scores, strict=True):
            assert found.token_ids == want[: len(found.token_ids)]
            assert len(set(want[len(found.token_ids) :])) <= 1, "transformers goes on behind the end"
            assert found.sequences_scores == pytest.approx(score, abs=1e-4, rel=1e-6)
            length = len(found.token_ids) ** params.length_penalty
            assert found.sequences_scores == pytest.approx(found.cumulative_logprob / length, rel=1e-6)
            assert (found.finish_reason == "stop") == (found.token_ids[-1] in (7, 100, 30))
            ended += found.finish_reason == "stop"
    assert ended > 5, "the end tokens were to be met"
    assert_idle(llm)


def test_one_beam_is_greedy(make_llm):
    llm = make_llm()
    prompts = tiny.prompts((5, 33), seed=1)
    greedy = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
    beams = llm.beam_search(prompts, BeamSearchParams(beam_width=1, max_tokens=12))
    assert [o.outputs[0].token_ids for o in beams] == [o.outputs[0].token_ids for o in greedy]
    assert [o.outputs[0].text for o in beams] == [o.outputs[0].text for o in greedy]


def test_blocks_and_copies_of_two_beams(make_llm, monkeypatch):
    """Blocks of four tokens, a prompt of five, and beams whose parents are prescribed."""
    parents = iter([[0, 0], [0, 0], [0, 0], [1, 0], [0, 1], [1, 1]])
    seen = []

    def prescribed(search, logits):
        note("computed")
        step = next(parents, None)
        return [] if step is None else [(parent, 5 + i) for i, parent in enumerate(step)]

    def note(when):
        stats = llm.engine.memory.stats()
        seen.append((when, stats.in_use, stats.cow_copies))

    monkeypatch.setattr(BeamSearch, "step", prescribed)
    llm = make_llm(block_size=4, kernels="reference", num_blocks=16, enable_prefix_caching=False)
    params = BeamSearchParams(beam_width=2, max_tokens=9)
    lifecycle, branches = llm.engine.lifecycle, llm.engine.output_processor.branches
    monkeypatch.setattr(branches, "conclude", lambda request: lifecycle.end_request(request, "length"))
    request = llm.engine.add_request("r", [1, 2, 3, 4, 5], params.sampling, options=[params])
    while not request.finished:
        llm.engine.step()
        note("chosen")
    assert seen == [
        ("computed", 2, 0), ("chosen", 2, 0),
        ("computed", 3, 1), ("chosen", 2, 1),
        ("computed", 3, 2), ("chosen", 2, 2),
        ("computed", 3, 3), ("chosen", 3, 3),
        ("computed", 5, 3), ("chosen", 5, 3),
        ("computed", 5, 3), ("chosen", 3, 3),
        ("computed", 4, 4), ("chosen", 0, 4),
    ]  # fmt: skip


def answers(outputs):
    return [[(each.token_ids, each.cumulative_logprob) for each in output.outputs] for output in outputs]


def same(found, want):
    """Tokens are equal, and log-probabilities but for rounding."""
    assert [[ids for ids, _ in each] for each in found] == [[ids for ids, _ in each] for each in want]
    flat = [[total for output in each for _, total in output] for each in (found, want)]
    assert flat[0] == pytest.approx(flat[1], abs=1e-4)


WIDE = BeamSearchParams(beam_width=4, max_tokens=24, num_return_sequences=4, ignore_eos=True)


def test_beams_begin_behind_a_prefix_that_is_cached(make_llm):
    (prompt,) = tiny.prompts((100,), seed=2)
    (want,) = make_llm(enable_prefix_caching=False).beam_search(prompt, WIDE)
    llm = make_llm()
    llm.generate(prompt, SamplingParams(max_tokens=1))
    (found,) = llm.beam_search(prompt, WIDE)
    assert found.metrics.num_cached_tokens == 96
    same(answers([found]), answers([want]))


def force(llm, monkeypatch, every):
    """Have all that runs give way each time that so many steps are over, and come back in the same step."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    decide = scheduler._decide

    def preempting(step):
        forced = engine.totals.steps % every == every - 1
        while forced and scheduler.running:
            victim = scheduler.running[-1]
            scheduler.preemptor.preempt([victim], victim, "itself", step)
        decide(step)

    monkeypatch.setattr(scheduler, "_decide", preempting)


def test_a_search_that_gave_way_and_is_aborted_leaves_nothing(make_llm, monkeypatch):
    llm = make_llm()
    engine, scheduler = llm.engine, llm.engine.scheduler
    other = engine.add_request("other", tiny.prompts((9,))[0], SamplingParams(temperature=0.0, max_tokens=20))
    request = engine.add_request("r", tiny.prompts((40,))[0], WIDE.sampling, options=[WIDE])
    decide = scheduler._decide

    def preempting(step):
        if len(request.sequences) == 4 and scheduler.running[-1].request is request:
            scheduler.preemptor.preempt([request.sequences[2]], other.sequences[0], "decode", step)
            step.pressed = True
        decide(step)

    monkeypatch.setattr(scheduler, "_decide", preempting)
    for _ in range(4):
        engine.step()
    (waiting,) = scheduler.waiting
    assert waiting.request is request
    assert len(waiting.followers) == 3
    engine.abort("r")
    while engine.has_unfinished:
        engine.step()
    assert other.error is None
    assert_idle(llm)


def test_a_beam_that_cannot_be_computed_ends_its_search_alone(make_llm, monkeypatch):
    llm = make_llm()
    engine = llm.engine
    other = engine.add_request("other", tiny.prompts((9,))[0], SamplingParams(temperature=0.0, max_tokens=20))
    request = engine.add_request("r", tiny.prompts((40,))[0], WIDE.sampling, options=[WIDE])
    while not (request.beams.begun and len(request.sequences) == 4):
        engine.step()
    bad, forward = request.sequences[2].seq_id, engine.runner.forward

    def failing(step):
        if any(item.seq.seq_id == bad for item in step):
            raise RuntimeError("no")
        return forward(step)

    monkeypatch.setattr(engine.runner, "forward", failing)
    while engine.has_unfinished:
        engine.step()
    assert request.error is not None
    assert other.error is None
    assert other.output().outputs[0].finish_reason == "length"
    assert_idle(llm)


def served(policy):
    made = make_policy(policy)
    return made.eviction_method is not EvictionMethod.KEEP and not made.needs & {Signal.FUTURE_QUERIES}


@pytest.mark.parametrize("policy", [name for name in policy_names() if served(name)])
def test_beams_that_are_compressed_score_as_teacher_forcing_does(make_llm, policy):
    """LLM.score compresses at the points at which generating does: so what beams sum up is what each output
    has alone, whatever it shared on its way."""
    llm = make_llm(num_blocks=60)
    wide = make_policy(policy).eviction_method in (EvictionMethod.BLOCKS, EvictionMethod.READS)
    config = small(policy, budget=64 if wide else 32, interval=16)
    prompts = tiny.prompts((90, 41), seed=6)
    outputs = llm.beam_search(prompts, WIDE, config)
    made = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        made += output.metrics.compactions
        for found in output.outputs:
            (score,) = llm.score([prompt], [found.token_ids], config)
            assert found.cumulative_logprob == pytest.approx(sum(score.logprobs), abs=2e-3)
    assert made or make_policy(policy).eviction_method is EvictionMethod.READS
    assert_idle(llm)


@pytest.mark.parametrize("form", ["int8", "int8+int4", "int4", "turboquant4"])
@pytest.mark.parametrize("policy", [None, *MOVING[:2]])
def test_beams_that_give_way_are_the_same_in_every_format(make_llm, monkeypatch, form, policy):
    config = None if policy is None else small(policy, budget=32)
    prompts = tiny.prompts((70, 37), seed=8)
    want = [make_llm(kv_cache_dtype=form).beam_search(prompt, WIDE, config)[0] for prompt in prompts]
    llm = make_llm(kv_cache_dtype=form)
    force(llm, monkeypatch, 7)
    found = llm.beam_search(prompts, WIDE, config)
    assert sum(llm.engine.totals.preemptions.values()) > 0
    same(answers(found), answers(want))
    assert_idle(llm)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2, "num_return_sequences": 3}, "num_return_sequences is 3"),
        ({"early_stopping": "always"}, "'always'"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(fields, words):
    with pytest.raises(InvalidArgumentError, match=words):
        BeamSearchParams(**fields)


@pytest.mark.parametrize(
    ("options", "fields", "words"),
    [
        ({"max_num_seqs": 3}, {"beam_width": 4}, "max_num_seqs is 3"),
        ({"max_num_batched_tokens": 3}, {"beam_width": 4}, "max_num_batched_tokens is 3"),
        ({"num_blocks": 9}, {"beam_width": 4, "max_tokens": 40}, "need 14 blocks, but the pool has 9"),
    ],
)
def test_a_search_that_can_never_run_is_refused(make_llm, options, fields, words):
    llm = make_llm(**options)
    with pytest.raises((InvalidArgumentError, RequestTooLongError), match=words):
        llm.beam_search(tiny.prompts((40,))[0], BeamSearchParams(**fields))
    assert_idle(llm)


def test_the_smallest_pool_that_is_let_in_is_enough(make_llm):
    llm = make_llm(num_blocks=14, enable_prefix_caching=False)
    params = BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True)
    (found,) = llm.beam_search(tiny.prompts((40,))[0], params)
    assert found.error is None
    assert len(found.outputs[0].token_ids) == 40


def test_generation_parameters_are_no_search(make_llm):
    with pytest.raises(InvalidArgumentError, match=r"params is a SamplingParams .* pass BeamSearchParams"):
        make_llm().beam_search([1, 2], SamplingParams())


class OwnParams(BeamSearchParams):
    """A caller's subclass."""


def test_a_subclass_of_the_parameters_is_a_beam_search(make_llm):
    llm, prompt = make_llm(), tiny.prompts((20,))
    want, got = (
        llm.beam_search(prompt, kind(beam_width=3, max_tokens=6))[0] for kind in (BeamSearchParams, OwnParams)
    )
    assert [out.token_ids for out in got.outputs] == [out.token_ids for out in want.outputs]
    assert got.outputs[0].sequences_scores == want.outputs[0].sequences_scores is not None
