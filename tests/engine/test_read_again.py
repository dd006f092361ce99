"""Prompts that are read again at their end: their attention, the policies that receive it, and refusals."""

from __future__ import annotations

import pytest
import tiny
import torch
from recording import Recorder, register
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.engine.signals import signals
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model import capture

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(autouse=True)
def recorder(monkeypatch) -> type[Recorder]:
    monkeypatch.setattr(capture, "REREAD_TOKENS", 40)
    return register(monkeypatch)


def config(policy: str = "recorder", **fields):
    return small(policy, options={"want": "again", "only_prompt": True}, **fields)


def paid_by_repetitions(model, tokenizer, context: list[int], part: int) -> list[torch.Tensor]:
    """[K, T] of each layer: transformers' own probabilities over the context and one repetition at a time."""
    length, best = len(context), None
    for start in range(0, length, part):
        instruction = []
        if tokenizer is not None and start == 0:
            instruction = tokenizer.encode("\n\nRepeat the previous context:\n")
        elif tokenizer is not None:
            instruction = tokenizer.encode("\n\nRepeat the part of the previous context starting with: ")
            instruction += context[start - 8 : start] + tokenizer.encode("\n")
        row = torch.tensor([context + instruction + context[start : start + part]])
        with torch.inference_mode():
            layers = model(row, output_attentions=True).attentions
        heads = model.config.num_key_value_heads
        paid = [p[0, :, length:, :length].amax(1) for p in layers if p is not None]
        shown = [p.unflatten(0, (heads, -1)).amax(1) for p in paid]
        best = shown if best is None else [torch.maximum(a, b) for a, b in zip(best, shown, strict=True)]
    return best


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_a_token_is_worth_what_a_repetition_pays_it(family, make_llm, calibrated_dir):
    llm = make_llm(family, max_num_batched_tokens=32, disable_hybrid_kv_cache_manager=True)
    (prompt,) = tiny.prompts((110,), seed=6)
    (out,) = llm.generate([prompt], GREEDY, config())
    assert (out.error, out.metrics.compactions, len(out.outputs[0].token_ids)) == (None, 1, 20)
    model = tiny.load_oracle(calibrated_dir(family))
    expected = paid_by_repetitions(model, llm.loaded.tokenizer, prompt, 40)
    assert len(Recorder.seen) == len(expected)
    for seen, wanted in zip(Recorder.seen, expected, strict=True):
        assert seen.logical_len == 110
        torch.testing.assert_close(seen.signals.read_again, wanted, atol=1e-5, rtol=1e-4)
    assert llm.engine.signals.passes.kept == {}
    assert_idle(llm)


@pytest.mark.parametrize("family", ["deepseek-v3", "gpt-oss", "glm4"])
def test_latents_sinks_and_partial_rotations_are_read_again(family, make_llm):
    """Over the cache as over the keys and values of a dense pass."""
    llm = make_llm(family, max_num_batched_tokens=32, disable_hybrid_kv_cache_manager=True)
    (prompt,) = tiny.prompts((140,), seed=6)
    (out,) = llm.generate([prompt], GREEDY, config())
    assert out.error is None
    found = [seen.signals.read_again for seen in Recorder.seen]
    held = {}
    capture.capture_queries(
        llm.loaded,
        [prompt],
        lambda *_: None,
        on_reached=lambda layer, _, keys, values, *__: held.update({layer: (keys, values)}),
    )
    expected = capture.read_again(llm.loaded, prompt, held.__getitem__)
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", tiny.HYBRIDS)
def test_repetitions_go_on_from_the_states_at_the_prompts_end_and_leave_them(
    family, make_llm, tiny_dir, monkeypatch
):
    llm = make_llm(family, max_num_batched_tokens=32)
    store, slots = llm.engine.states.store, llm.engine.memory.recurrent.sizes.num_slots
    read_again, changed = signals.read_again, []

    def watched(*args):
        before = [one for slot in range(slots) for one in store.save(slot)]
        found = read_again(*args)
        after = [one for slot in range(slots) for one in store.save(slot)]
        changed.append(not all(map(torch.equal, before, after)))
        return found

    monkeypatch.setattr(signals, "read_again", watched)
    (prompt,) = tiny.prompts((110,), seed=6)
    (out,) = llm.generate([prompt], GREEDY, config())
    assert (out.error, out.metrics.compactions, changed) == (None, 1, [False])
    model = tiny.load_oracle(tiny_dir(family))
    model.set_attn_implementation("eager")
    expected = paid_by_repetitions(model, llm.loaded.tokenizer, prompt, 40)
    assert len(Recorder.seen) == len(expected)
    for seen, wanted in zip(Recorder.seen, expected, strict=True):
        torch.testing.assert_close(seen.signals.read_again, wanted, atol=1e-4, rtol=1e-3)
    assert_idle(llm)


@pytest.mark.parametrize("family", ["llama", "qwen3-next", "falcon-h1", "lfm2", "jamba"])
@pytest.mark.parametrize("policy", ["kvzip", "shares(kvzip)", "ada_kv(kvzip)"])
def test_kvzip_among_others_does_what_it_does_alone(policy, family, make_llm):
    llm = make_llm(family, block_size=8, max_num_batched_tokens=64)
    prompts = tiny.prompts((100, 61, 90), seed=2)
    settings = small(policy, budget=32)
    together = llm.generate(prompts, GREEDY, settings)
    alone = [llm.generate([prompt], GREEDY, settings)[0] for prompt in prompts]
    assert [out.error for out in together] == [None] * 3
    assert [out.outputs[0].token_ids for out in together] == [out.outputs[0].token_ids for out in alone]
    assert [out.metrics.compactions for out in together] == [1, 1, 1]
    assert llm.engine.signals.passes.kept == {}
    assert_idle(llm)


def test_who_compresses_more_than_once_is_refused(make_llm):
    llm = make_llm()
    with pytest.raises(InvalidArgumentError, match=r"needs the prompt read again.*set prompt_only"):
        llm.generate(tiny.prompts((30,)), GREEDY, small("recorder", options={"want": "again"}))
    assert_idle(llm)


def test_a_prompt_that_leaves_no_position_fails_alone(make_llm, monkeypatch):
    llm = make_llm(max_num_batched_tokens=64, enable_prefix_caching=False)
    most = llm.loaded.facts.max_position
    long, short = tiny.prompts((most - 30, 60), seed=3)
    bad, good = llm.generate([long, short], GREEDY, small("kvzip"))
    assert f"a prompt of {most - 30} tokens cannot be repeated" in bad.error
    assert (good.error, good.metrics.compactions) == (None, 1)
    assert_idle(llm)
