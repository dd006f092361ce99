"""LLM as vLLM's users know it: prompts as mappings, a context manager, figures."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import tiny
import torch

import kvreclaim
from kvreclaim import Chunk, ChunkReuse, CompressionConfig, InvalidArgumentError, SamplingParams
from kvreclaim.compression.policy import CompressionPolicy
from kvreclaim.engine.api.prompts import prompt_keys

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def test_prompts_may_be_mappings(make_llm) -> None:
    llm = make_llm("llama")
    (ids,) = tiny.prompts((12,))
    (plain,) = llm.generate([ids], GREEDY)
    for prompts in ({"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], [{"prompt_token_ids": ids}, ids]):
        for out in llm.generate(prompts, GREEDY):
            assert out.prompt_token_ids == ids
            assert out.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({}, "prompt"),
        ({"text": "a"}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt"),
        ({"prompt_token_ids": "a"}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"prompt": "a", "priority": 1}, "prompt"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "\x00"}, "cache_salt"),
        ({"prompt": "a", "chunk_reuse": ChunkReuse()}, "chunk_reuse"),
        ({"prompt": [Chunk("a"), "b"], "chunk_reuse": "none"}, "chunk_reuse"),
        ({"prompt": "a", "sparse_prefill": 1}, "sparse_prefill"),
        ({"prompt": "a", "compress_prompt_at": "1"}, "compress_prompt_at"),
    ],
)
def test_a_wrong_mapping_is_refused(make_llm, prompt, field) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        make_llm("llama").generate([prompt], GREEDY)
    assert refused.value.field == field


def test_chat_answers_each_conversation(make_llm) -> None:
    """One or several, each with options of its own, as their rendered prompts are answered."""
    llm = make_llm("llama")
    conversations = [[{"role": "user", "content": text}] for text in ("end", "stop")]
    texts = ["user: end\nassistant: ", "user: stop\nassistant: "]
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)]
    expected = [out.outputs[0].token_ids for out in llm.generate(texts, params)]
    assert [out.outputs[0].token_ids for out in llm.chat(conversations, params)] == expected
    assert [out.outputs[0].token_ids for out in llm.chat(conversations[0], params[0])] == expected[:1]
    with pytest.raises(InvalidArgumentError) as refused:
        llm.chat(conversations, params[:1])
    assert refused.value.field == "sampling_params"
    for empty in ([], [[]]):
        with pytest.raises(InvalidArgumentError) as refused:
            llm.chat(empty)
        assert refused.value.field == "messages"


@dataclass(frozen=True)
class LoudValues(CompressionPolicy):
    """Scores as knorm's, of values."""

    name = "loud_values"

    def score(self, view) -> torch.Tensor:
        return view.source.value_norms()


def test_a_with_block_compresses_requests_without_a_compression_of_their_own(make_llm) -> None:
    """The block, the argument and the LLM take a policy object or a text alike."""
    prompts = tiny.prompts((90, 120))
    size = {"budget": 32, "interval": 16, "sinks": 2, "recent": 4}
    mine, knorm = CompressionConfig(LoudValues(), **size), CompressionConfig("knorm", **size)
    llm = make_llm("llama", compression=knorm)

    def rows(outs) -> list:
        return [
            (out.outputs[0].token_ids, out.metrics.policy, out.metrics.blocks_freed, out.metrics.budget)
            for out in outs
        ]

    passed, own = rows(llm.generate(prompts, GREEDY, mine)), rows(llm.generate(prompts, GREEDY))
    assert [row[1] for row in passed + own] == ["loud_values"] * 2 + ["knorm"] * 2
    assert all(row[2] > 0 for row in passed + own)
    with llm.compressed(mine) as same:
        assert same is llm
        assert rows(llm.generate(prompts, GREEDY)) == passed
        assert rows(llm.generate(prompts, GREEDY, knorm)) == own
        with llm.compressed(None):
            assert {row[1:] for row in rows(llm.generate(prompts, GREEDY))} == {(None, 0, None)}
        assert rows(llm.generate(prompts, GREEDY)) == passed
    assert rows(llm.generate(prompts, GREEDY)) == own
    with pytest.raises(InvalidArgumentError, match="policy auto is"), llm.compressed(CompressionConfig()):
        pass
    with pytest.raises(ZeroDivisionError), llm.compressed(mine):
        raise ZeroDivisionError
    assert rows(llm.generate(prompts, GREEDY)) == own


def test_the_page_names_every_option() -> None:
    """docs/api.md, in the order that positional arguments have."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    rows = [line.split("|")[3] for line in page.split("## Python")[1].splitlines() if line.startswith("| ")]
    named = [re.findall(r"`(\w+)`", row) for row in rows[1:4]]
    assert named[0] == [each.name for each in fields(SamplingParams) if each.init]
    derived = {"auto_budget", "budget_share", "policy_object"}
    assert {*named[1]} == {each.name for each in fields(CompressionConfig)} - derived
    assert {*named[2]} == {"prompt", "prompt_token_ids", *prompt_keys()}


def test_the_pages_example_runs(capsys) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text().split("## Python")[1]
    exec(page.split("```python")[1].split("```")[0], {})
    assert " 2 " in capsys.readouterr().out


def test_it_closes_at_the_end_of_a_with(make_llm, monkeypatch) -> None:
    closed = []
    with make_llm("llama") as llm:
        monkeypatch.setattr(llm.engine, "close", lambda: closed.append(True))
    assert closed == [True]


def test_figures_are_a_copy(make_llm) -> None:
    llm = make_llm("llama")
    before = llm.stats()
    llm.generate(tiny.prompts((12,)), GREEDY)
    after = llm.stats()
    assert (before.totals.steps, before.totals.generation_tokens) == (0, 0)
    assert (after.totals.generation_tokens, after.num_running, after.num_waiting) == (5, 0, 0)
    assert after.memory == llm.engine.memory.stats()
    assert after.offload is None


def test_public_names_are_exported() -> None:
    for name in ("AsyncEngine", "EngineConfig", "RequestOutput", "Retention", "SpeculativeConfig"):
        assert getattr(kvreclaim, name).__name__ == name
    assert issubclass(kvreclaim.RequestTooLongError, kvreclaim.KVReclaimError)
