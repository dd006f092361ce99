"""Reasoning is counted token by token, and a budget ends it, whatever else the engine does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from settings import assert_idle, small

from kvreclaim import LLM, SamplingParams
from kvreclaim.engine.features.thinking.tracker import ThinkTracker
from kvreclaim.engine.sampling.detokenizer import Detokenizer
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.parsers.formats import Splitter, think_format
from kvreclaim.parsers.pieces import Reasoning, merged
from kvreclaim.parsers.thinking import THINK, ThinkSpan

CLOSING = "</think>"
PROMPT = "the end of the story, then the stop <think>"
BYTES = tiny.tokenizer()
PARTS = ["a", "€", "</", "<think>", CLOSING, " ", "\n", "end", "<|end|>", "<|channel|>analysis<|message|>"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has no end token, whose template shows reasoning."""
    path = tiny.save_model("llama", tmp_path_factory.mktemp("thinking"))
    tokenizer = tiny.tokenizer(eos_token=None)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %} <think>"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def make(directory: Path) -> Callable[..., LLM]:
    return lambda **options: LLM(directory, **{"dtype": "float32", "num_blocks": 96, **options})


def with_budget(budget: int | None, *, max_tokens: int = 24, **more) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, **more}, thinking_token_budget=budget
    )


def tracked(text: str, span: ThinkSpan, budget: int | None = None) -> ThinkTracker:
    tracker = ThinkTracker(span, BYTES, budget)
    for token in BYTES.encode(text, add_special_tokens=False):
        tracker.take(token)
    return tracker


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.booleans())
def test_what_is_counted_is_what_the_parser_calls_reasoning(text: str, begun: bool) -> None:
    """Counted by bytes, one a token, but for merged words; the parser leaves out white space around it."""
    opening = r"(?:\s*<think>)?" if begun else r"\s*<think>"
    inside = re.match(rf"{opening}(.*?)(?:{CLOSING}|\Z)", text, re.DOTALL)
    expected = inside[1] if inside else ""
    num_tokens = len(BYTES.encode(expected, add_special_tokens=False))
    assert tracked(text, ThinkSpan(THINK, begun)).num_tokens == num_tokens
    splitter = Splitter(None, "think", prompt_end="<think>" if begun else "")
    [*found] = [p.text for p in merged(splitter.take(text, last=True)) if isinstance(p, Reasoning)]
    assert "".join(found).strip() == expected.strip()


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_so_it_is_in_the_channels_of_harmony(text: str) -> None:
    form = think_format("harmony")
    spans = re.findall(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|\Z)", text, re.DOTALL)
    counted = sum(len(BYTES.encode(span, add_special_tokens=False)) for span in spans)
    assert tracked(text, ThinkSpan(form)).num_tokens == counted
    ended = tracked("<|channel|>analysis<|message|>abc", ThinkSpan(form), 3)
    assert BYTES.decode(ended._queue) == "<|end|><|start|>assistant<|channel|>final<|message|>"


SHORT = ["a", "b", "</", "<think>", CLOSING, " ", "\n"]


@given(
    st.lists(st.sampled_from(SHORT), max_size=10).map("".join),
    st.booleans(),
    st.lists(st.sampled_from(["a", "ab", "<", "think", " ", "\n", "b a", CLOSING]), max_size=3),
)
def test_stop_strings_end_the_answer_only(text: str, begun: bool, stops: list[str]) -> None:
    """Text once printed never changes; the answer begins behind the white space after the reasoning."""
    opening = r"(?:\s*<think>)?" if begun else r"\s*<think>"
    inside = re.match(rf"{opening}.*?(?:{CLOSING}\s*|\Z)", text, re.DOTALL)
    start, expected = (inside.end() if inside else 0), text
    ids = BYTES.encode(text, add_special_tokens=False)
    for size in range(1, len(ids) + 1):
        known = BYTES.decode(ids[:size])
        unsure = not begun and "<think>".startswith(known.lstrip())
        hits = [known.find(stop, start) for stop in stops if stop in known[start:]]
        if hits and not unsure:
            expected = known[: min(hits)]
            break
    tracker, detokenizer = ThinkTracker(ThinkSpan(THINK, begun), BYTES), Detokenizer(BYTES, tuple(stops))
    for token in ids:
        printed = detokenizer.text
        tracker.take(token)
        known = {"num_answer": tracker.num_answer, "is_unsure": tracker.is_unsure}
        if detokenizer.append(token, may_stop=True, **known) is not None:
            break
        assert detokenizer.text.startswith(printed)
    detokenizer.finish()
    assert detokenizer.text == expected


def test_a_call_ends_the_reasoning_and_no_budget_cuts_it() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    span = ThinkSpan(THINK, calls="hermes")
    for budget in (None, 5, 30):
        tracker = ThinkTracker(span, BYTES, budget)
        for token in BYTES.encode(f"<think>abc{call}", add_special_tokens=False):
            assert tracker.forced is None
            tracker.take(token)
        assert (tracker.num_tokens, tracker.inside) == (3, False)
    for mention in ("abc <tool_call> d", "<tool_call>{}"):
        tracker = tracked(f"<think>{mention}", span, len(mention))
        assert (tracker.num_tokens, tracker.inside) == (len(mention), True)
        assert tracker.forced is not None


def test_stop_strings_wait_for_the_final_channel_of_harmony() -> None:
    text = "<|channel|>analysis<|message|>final<|end|><|start|>assistant<|channel|>final<|message|>Hi, final."
    tracker, found = ThinkTracker(ThinkSpan(think_format("harmony")), BYTES), Detokenizer(BYTES, ("final",))
    for token in BYTES.encode(text, add_special_tokens=False):
        tracker.take(token)
        known = {"num_answer": tracker.num_answer, "is_unsure": tracker.is_unsure}
        if found.append(token, may_stop=True, **known) is not None:
            break
    assert found.text == text.removesuffix("final.")


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_budget_ends_the_reasoning_and_nothing_else(make, budget: int) -> None:
    """Before it the tokens are those without a budget, behind it those that follow such a text."""
    llm = make()
    closing = llm.tokenizer.encode(CLOSING, add_special_tokens=False)
    prompt = llm.tokenizer.encode(PROMPT)
    (free,) = llm.generate(PROMPT, with_budget(None))
    begun = free.outputs[0].token_ids[:budget] + closing
    (rest,) = llm.generate([prompt + begun], with_budget(None, max_tokens=24 - len(begun)))
    (out,) = llm.generate(PROMPT, with_budget(budget))
    assert out.outputs[0].token_ids == begun + rest.outputs[0].token_ids
    assert out.metrics.num_reasoning_tokens == budget
    assert free.metrics.num_reasoning_tokens is None
    (long,) = llm.generate(PROMPT, with_budget(1000))
    assert long.outputs[0].token_ids == free.outputs[0].token_ids
    assert long.metrics.num_reasoning_tokens == 24


def token_ids(llm: LLM, params: list[SamplingParams], *compression) -> list[list[list[int]]]:
    outs = llm.generate([PROMPT * 3] * len(params), params, *compression)
    assert_idle(llm)
    return [[output.token_ids for output in out.outputs] for out in outs]


SEVERAL = [
    with_budget(budget, max_tokens=30, temperature=temperature, n=n, seed=budget, logit_bias={60: -100})
    for budget, temperature, n in ((3, 1.0, 3), (11, 0.0, 1), (0, 1.5, 2), (17, 0.7, 1))
]


def test_it_holds_for_several_outputs_drafts_and_preempted_requests(make) -> None:
    """A draft that would go on with the reasoning is no token; what must come overrides a bias against it."""
    expected = token_ids(make(), SEVERAL)
    closing = BYTES.encode(CLOSING, add_special_tokens=False)
    for outputs, params in zip(expected, SEVERAL, strict=True):
        budget = params.thinking_token_budget
        assert all(tokens[budget : budget + len(closing)] == closing for tokens in outputs)
        assert len({tuple(tokens) for tokens in outputs}) == params.n
    drafting = make(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    assert token_ids(drafting, SEVERAL) == expected
    small_pool = make(num_blocks=14, max_model_len=192, max_num_seqs=6, enable_prefix_caching=False)
    assert token_ids(small_pool, SEVERAL) == expected
    assert sum(small_pool.stats().totals.preemptions.values()) > 0


def test_it_holds_under_compression_and_where_a_compressed_cache_drafts(make) -> None:
    config = small("streaming_llm")
    (greedy,) = token_ids(make(), [with_budget(9, max_tokens=60)])
    (compressed,) = token_ids(make(), [with_budget(9, max_tokens=60)], config)
    closing = BYTES.encode(CLOSING, add_special_tokens=False)
    assert compressed[0][9 : 9 + len(closing)] == closing
    verifying = small("streaming_llm", verify=True)
    assert token_ids(make(), [with_budget(9, max_tokens=60)], verifying) == [greedy]


def test_a_budget_needs_a_known_way_to_reason(make_llm, make) -> None:
    with pytest.raises(InvalidArgumentError, match="nothing says how this model writes") as refused:
        make_llm().generate(PROMPT, with_budget(3))
    assert refused.value.field == "thinking_token_budget"
    (out,) = make().chat([{"role": "user", "content": "the end"}], with_budget(2))
    assert out.outputs[0].token_ids[2:9] == BYTES.encode(CLOSING, add_special_tokens=False)
