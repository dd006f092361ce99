"""A chat's system prompt and tools stay in the cache of every head, if the template writes them first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from settings import small

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.compression.policies.surrogate import Surrogate
from kvreclaim.engine.api.chat import num_system_tokens, render_chat
from kvreclaim.model.loader import load_model
from kvreclaim.schedule.budget.footprint import Footprint, check_blocks

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SYSTEM = "never say the word of the day, which is kestrel"
TALK = [
    {"role": "user", "content": "a tale of the sea"},
    {"role": "assistant", "content": "a ship came in"},
    {"role": "user", "content": "and then the end"},
]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TEMPLATES = {
    "turns": TURNS,
    "system and tools in a turn of their own": "{% if tools %}<system>{{ tools | tojson }}{% endif %}"
    + TURNS,
    "system and tools in the user's turn": "{% for m in messages[1:] %}<{{ m.role }}>{% if loop.first %}"
    "{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{% endif %}{% endif %}"
    "{{ m.content }}</>{% endfor %}",
}


@pytest.fixture(scope="module")
def loaded(tiny_dir):
    return load_model(tiny_dir("llama"), dtype="float32", device="cpu")


def leading(loaded, messages, **template):
    """The text of the leading tokens."""
    ids = render_chat(loaded, messages, **template)
    return loaded.tokenizer.decode(ids[: num_system_tokens(loaded, ids, messages, **template)])


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_what_comes_before_the_conversation_is_counted(loaded, template, role):
    tools = [TOOL] if "tools" in template else None
    messages = [{"role": role, "content": SYSTEM}, *TALK]
    found = leading(loaded, messages, chat_template=template, tools=tools)
    assert SYSTEM in found
    assert ('"find"' in found) == (tools is not None)
    assert "tale" not in found
    listed = [messages[0], {"role": "user", "content": [{"type": "text", "text": "a tale"}]}]
    assert SYSTEM in leading(loaded, listed, chat_template=template, tools=tools)


def test_a_system_prompt_alone_is_all_of_it(loaded):
    only = [{"role": "system", "content": SYSTEM}]
    assert leading(loaded, only, chat_template=TURNS).endswith(f"{SYSTEM}</>")


@given(
    num_tokens=st.integers(0, 3000),
    budget=st.integers(1, 600),
    recent=st.integers(0, 300),
    sinks=st.integers(0, 60),
    interval=st.integers(1, 200),
    block_size=st.sampled_from((1, 8, 16, 64)),
    policy=st.sampled_from(("knorm", "paged_eviction", "quest", "shares(knorm)")),
)
def test_what_is_served_without_protection_is_served_with_it(
    num_tokens, budget, recent, sinks, interval, block_size, policy
):
    """At most half of what is free goes to it, in whole blocks, and nothing is refused on its account."""
    if budget <= sinks + recent:
        return
    config = CompressionConfig(policy, budget, interval, sinks, recent)
    found, plain = config.protecting(num_tokens, block_size), Footprint(block_size=block_size)
    assert found.sinks == sinks or found.sinks <= (budget - recent) // 2
    assert sinks <= found.sinks <= max(sinks, num_tokens + block_size - 1)
    assert found.in_blocks(block_size).budget == config.in_blocks(block_size).budget
    try:
        check_blocks(config.in_blocks(block_size).footprint(plain), policy)
    except ValueError:
        return
    check_blocks(found.in_blocks(block_size).footprint(plain), policy)


def test_off_and_verify_change_nothing():
    for config in (CompressionConfig("knorm", protect_system=False), CompressionConfig("knorm", verify=True)):
        assert config.protecting(500, 16) is config


@pytest.fixture
def held(monkeypatch):
    """Positions [K, T] of what the policy is shown after the first pass."""
    seen, score = [], Surrogate.score_many

    def watching(self, views):
        seen.extend(view.signals.positions for view in views if not view.first)
        return score(self, views)

    monkeypatch.setattr(Surrogate, "score_many", watching)
    return seen


@pytest.mark.parametrize("policy", ["shares(surrogate)", "shares(surrogate, by=static)", "surrogate"])
@pytest.mark.parametrize(("budget", "sinks"), [(192, 64), (96, 32)])
def test_every_head_holds_the_system_prompt_after_every_pass(policy, budget, sinks, make_llm, held, caplog):
    """A longer one takes at most half of the free tokens; without protection it is evicted."""
    llm = make_llm(max_num_batched_tokens=64)
    conversation = [{"role": "system", "content": SYSTEM}, *TALK * 6]
    for protect in (True, False):
        held.clear()
        config = small(policy, budget=budget, interval=16, sinks=1, recent=16, protect_system=protect)
        with caplog.at_level("INFO", logger="kvreclaim"):
            (out,) = llm.chat(conversation, GREEDY, config)
        assert out.metrics.compactions > 2
        assert out.metrics.sinks == (sinks if protect else 1)
        kept = [set(range(sinks)) <= {*row} for positions in held for row in positions.tolist()]
        assert all(kept) if protect else not all(kept)
    assert ("of 56 tokens of system prompt and tools are protected" in caplog.text) == (sinks < 56)
