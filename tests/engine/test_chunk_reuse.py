"""Chunks computed alone and reused out of place: every token sees the keys that it should, no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from checking import logprobs, tokens
from chunk_shadow import shadow_logits, with_chunks
from settings import assert_idle, small

from kvreclaim import Chunk, ChunkReuse, SamplingParams
from kvreclaim.chunks import SELECTIONS
from kvreclaim.engine.api.prompts import laid_out
from kvreclaim.engine.features.chunks import prompts as chunked
from kvreclaim.engine.features.chunks.feature import ReusedChunks
from kvreclaim.engine.features.chunks.prompts import squared_change
from kvreclaim.errors import InvalidArgumentError, RequestTooLongError
from kvreclaim.ops.rope import rotate

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
SMALL = {"block_size": 8, "max_num_batched_tokens": 48, "max_num_seqs": 8}
HEAD, A, B, C, QUESTION = tiny.prompts((14, 40, 75, 50, 9), seed=7)
PROMPT = [Chunk(A), Chunk(B), Chunk(C), QUESTION]
FAMILIES = ("llama", "qwen3", "glm4", "olmo2", "smollm3", "phi3", "llama-yarn", "deepseek-v3")


def reusing(how, prompt=PROMPT):
    return {"prompt": prompt, "chunk_reuse": how}


def run(llm, how, prompt=PROMPT, params=GREEDY, until=lambda request: request.finished):
    """Add a request with chunks, and step until `until` holds."""
    ids, chunks = laid_out(prompt, how, lambda text, begins: [])
    request = llm.engine.add_request("r", ids, params, options=[chunks])
    while not until(request):
        llm.engine.step()
    return request


def near(a, b, off=1e-4):
    torch.testing.assert_close(torch.tensor(logprobs(a)), torch.tensor(logprobs(b)), atol=off, rtol=0)


def test_deviations_of_the_reference():
    old = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]])[:, None]
    new = torch.tensor([[1.0, 0.0], [0.5, 1.0], [1.0, 0.0], [2.1, 0.0]])[:, None]
    np.testing.assert_allclose(squared_change(old, new), [0, 0.25, 1, 0.01], atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_computing_all_anew_is_the_whole_prompt(family, make_llm):
    whole = make_llm(family, **SMALL).generate([A + B + C + QUESTION], GREEDY)
    for how in (ChunkReuse(share=1.0), ChunkReuse(select="all")):
        llm = make_llm(family, **SMALL)
        found = llm.generate(reusing(how), GREEDY)
        assert tokens(found) == tokens(whole)
        near(found, whole)
        assert found[0].metrics.num_reused_tokens == 0
        assert_idle(llm)


@pytest.mark.parametrize("select", [name for name in SELECTIONS if name != "all"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4", "deepseek-v3"])
@pytest.mark.parametrize("head", [[], HEAD], ids=["bare", "head"])
def test_every_token_sees_what_it_should(head, family, select, make_llm):
    """Chunks computed alone, then those that are computed anew, together."""
    llm = make_llm(family, **SMALL)
    request = run(llm, ChunkReuse(select=select, share=0.3, lead=12), [head, *PROMPT])
    ids, reuse, found = request.prompt_token_ids, request.reuse, request.output()
    share = 0.0 if select == "none" else 0.3
    reusable = 72 + 48 if not head else 36 + 68 + 44
    assert (~reuse.anew).sum() == reusable - round(share * reusable)
    logits = shadow_logits(llm.loaded.model, ids, reuse.sources, reuse.anew)[-1]
    ((token, drawn),) = list(found.outputs[0].logprobs[0].items())
    assert token == int(logits.argmax())
    assert drawn.logprob == pytest.approx(float(logits.float().log_softmax(-1)[token]), abs=1e-4)
    assert found.metrics.num_reused_tokens == (~reuse.anew).sum()


@pytest.mark.parametrize("budget", [17, 48, 512])
@torch.inference_mode()
def test_what_the_question_attends_to(budget, make_llm):
    """The scores are sums of attention over chunks as they are; however the prompt is cut."""
    llm = make_llm("qwen3", **SMALL | {"max_num_batched_tokens": budget})
    tried, add = [], llm.engine.feature(ReusedChunks).prompts.add

    def spy(name, tokens, params, parent, trial):
        tried.append(trial)
        return add(name, tokens, params, parent, trial)

    llm.engine.feature(ReusedChunks).prompts.add = spy
    request = run(llm, ChunkReuse(select="question", share=0.2), [HEAD, *PROMPT])
    trial, ids = tried[-1], request.prompt_token_ids
    oracle = with_chunks(llm.loaded.model, ids, trial.sources, query_start=len(ids) - len(QUESTION))
    oracle.run(llm.loaded.model, ids, np.flatnonzero(trial.anew))
    wanted = sum(oracle.seen[layer] for layer in trial.layers)
    torch.testing.assert_close(torch.from_numpy(trial.scores), wanted, atol=1e-4, rtol=1e-4)
    assert wanted[: len(HEAD)].sum() > 0


def test_selections_choose_what_they_say(make_llm, monkeypatch):
    llm = make_llm(**SMALL)
    chosen = {}
    for select in ("change", "question", "deviation", "first", "random", "none"):
        how = ChunkReuse(select=select, share=0.25, first=3)
        reuse = run(llm, how).reuse
        begun = [np.arange(a, b) for a, b in ((40, 112), (115, 163))]
        chosen[select] = [at for at in np.concatenate(begun) if reuse.anew[at]]
    assert chosen["none"] == []
    assert chosen["first"] == [*range(40, 55), *range(115, 130)]
    assert {40, 41, 42, 115, 116, 117} <= set(chosen["question"]) & set(chosen["change"])
    assert len({tuple(each) for each in chosen.values()}) == 6
    assert {len(each) for name, each in chosen.items() if name != "none"} == {30}


def test_a_first_chunk_is_exact_and_the_others_serve_no_other_prompt(make_llm):
    llm = make_llm(**SMALL)
    cold = make_llm(**SMALL)
    llm.generate(PROMPT, GREEDY)
    for prompt, cached in ((A + B, 40), (B + QUESTION, 0), (A + B + C + QUESTION, 40)):
        (found,) = llm.generate([prompt], GREEDY)
        assert found.metrics.num_cached_tokens == cached
        near([found], cold.generate([prompt], GREEDY))
        llm.engine.reset_prefix_cache()
        cold.engine.reset_prefix_cache()
        llm.generate(PROMPT, GREEDY)


def test_chunks_are_computed_once_in_whatever_order(make_llm):
    llm = make_llm(**SMALL)
    llm.generate(PROMPT, GREEDY)
    before = llm.engine.totals.prompt_tokens
    prompt = reusing(ChunkReuse(select="none"), [Chunk(C), Chunk(B), Chunk(A), QUESTION])
    warm = llm.generate(prompt, GREEDY)
    assert llm.engine.totals.prompt_tokens - before == 174 + 40, (
        "the prompt, and A, which was computed as a first"
    )
    near(warm, make_llm(**SMALL).generate(prompt, GREEDY))


def test_how_a_prompt_is_cut_and_who_is_beside_change_nothing(make_llm):
    calm = make_llm(**SMALL | {"max_num_batched_tokens": 512}).generate(PROMPT, GREEDY)
    long = replace(GREEDY, max_tokens=40)
    others = [*tiny.prompts((60, 33), seed=2)]
    for sizes in ({}, {"max_num_batched_tokens": 17}):
        llm = make_llm(**SMALL | sizes)
        beside = llm.generate([others[0], PROMPT, others[1]], [long, GREEDY, long])
        assert tokens(beside[1:2]) == tokens(calm)
        near(beside[1:2], calm)
        assert_idle(llm)


def test_what_has_no_room_beside_the_prompt_is_computed(make_llm):
    """The prompt's own blocks come first; what was counted as reused was."""
    tight = make_llm(num_blocks=24, **SMALL)
    request = run(tight, ChunkReuse(select="none"))
    metrics, reuse = request.output().metrics, request.reuse
    assert metrics.num_gone_tokens > 0
    assert metrics.num_gone_tokens + metrics.num_reused_tokens == 72 + 48
    logits = shadow_logits(tight.loaded.model, request.prompt_token_ids, reuse.sources, reuse.anew)[-1]
    ((token, drawn),) = request.output().outputs[0].logprobs[0].items()
    assert drawn.logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)
    assert_idle(tight)


def test_forks_and_compression(make_llm):
    """Outputs share a prompt with chunks; a pass may come in the midst of it."""
    many = replace(GREEDY, n=3, temperature=1.0, seed=1)
    llm = make_llm(**SMALL)
    assert len(tokens(llm.generate(PROMPT, many))) == 3
    config = small("knorm", budget=64, interval=16)
    how = ChunkReuse(select="first", share=1.0)
    found = make_llm(**SMALL).generate(reusing(how), GREEDY, config)
    whole = make_llm(**SMALL).generate([A + B + C + QUESTION], GREEDY, config)
    assert found[0].metrics.compactions == whole[0].metrics.compactions > 1
    near(found, whole)
    some = llm.generate(PROMPT, GREEDY, config)
    assert some[0].error is None
    assert some[0].metrics.num_reused_tokens > 0
    assert_idle(llm)


def test_what_has_gone_from_the_cache_is_computed(make_llm):
    """Between being made ready and being run: all of it anew is the whole prompt."""
    llm = make_llm(**SMALL)
    how = ChunkReuse(select="none")
    request = run(llm, how, until=lambda request: len(llm.engine.scheduler.waiting) + len(request.children))
    while not request.finished:
        if not request.children:
            llm.engine.reset_prefix_cache()
        llm.engine.step()
    near([request.output()], make_llm(**SMALL).generate([request.prompt_token_ids], GREEDY))
    assert request.output().metrics.num_reused_tokens == 0


@pytest.mark.parametrize("form", ["bf16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_formats(form, kernels, make_llm):
    sizes = {**SMALL, "block_size": 16, "kernels": kernels, "kv_cache_dtype": form}
    found = make_llm("qwen3", **sizes).generate(PROMPT, GREEDY)
    plain = make_llm("qwen3", **SMALL | {"block_size": 16}).generate(PROMPT, GREEDY)
    assert found[0].error is None
    assert logprobs(found)[0][0] == pytest.approx(logprobs(plain)[0][0], abs=0.3)


@pytest.mark.parametrize(
    ("family", "more", "config", "message"),
    [
        ("mistral", {}, None, "has layers with sliding windows"),
        ("gemma2", {}, None, "has layers with sliding windows"),
        ("llama4", {}, None, "has layers with sliding windows or chunks"),
        ("llama", {"enable_prefix_caching": False}, None, "enable_prefix_caching is False"),
        ("llama", {}, small("snapkv"), "policy snapkv needs signals of every token"),
        ("llama", {}, small("kvzap"), "policy kvzap needs signals of every token"),
    ],
)
def test_what_cannot_be_served_is_refused(family, more, config, message, make_llm):
    llm = make_llm(family, **SMALL | more)
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate(PROMPT, GREEDY, config)
    assert_idle(llm)


def test_a_trial_needs_room_for_the_whole_prompt(make_llm):
    llm, config = make_llm(num_blocks=20, **SMALL), small("knorm", budget=48, interval=16)
    with pytest.raises(RequestTooLongError, match="needs 175 slots, but the pool holds 160"):
        llm.generate(PROMPT, GREEDY, config)
    (found,) = llm.generate(reusing(ChunkReuse(select="first")), GREEDY, config)
    assert found.error is None
    assert_idle(llm)


def test_wrong_prompts_are_one_sentence(make_llm):
    llm = make_llm(**SMALL)
    with pytest.raises(InvalidArgumentError, match="ends with a chunk"):
        llm.generate([Chunk(A), Chunk(B)], GREEDY)
    with pytest.raises(InvalidArgumentError, match="pass text or token ids that are not empty"):
        Chunk("")
    with pytest.raises(InvalidArgumentError, match="chunk_reuse: select is 'best'"):
        ChunkReuse(select="best")
    with pytest.raises(InvalidArgumentError, match="chunk_reuse: share"):
        ChunkReuse(share=1.5)


def test_the_gate_refuses_a_rotation_that_is_not_the_models(make_llm, monkeypatch):
    monkeypatch.setattr(chunked, "rotate", lambda k, by, layout: rotate(k, by + 1, layout))
    with pytest.raises(InvalidArgumentError, match=r"rotated keys .* are off by .* of what the model"):
        make_llm(**SMALL).generate(PROMPT, GREEDY)
