"""Structured outputs: every output follows its grammar, whatever else its request and the engine do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import tiny
import torch
from settings import assert_idle

from kvreclaim import LLM, CompressionConfig, SamplingParams, StructuredOutputsParams
from kvreclaim.engine.features.structured_outputs import grammar
from kvreclaim.engine.features.structured_outputs.feature import StructuredOutputs
from kvreclaim.engine.features.structured_outputs.grammar import Grammars
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.sampling.sampler import SampleRow
from kvreclaim.errors import InvalidArgumentError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
REGEX = r"[0-9]{3}-[a-f]{2,5}"
CHOICES = ["yes", "no", "not at all"]
GRAMMAR = 'start: "(" start ")" | "x"'
GBNF = 'root ::= "ab" [cd]+ "e"'
PROMPT = "Write a line about " * 3


@pytest.fixture(scope="module")
def llm(real_dir: Path) -> LLM:
    return LLM(real_dir, num_blocks=96, max_model_len=512, max_num_seqs=8)


def structured(temperature: float = 1.0, n: int = 1, seed: int = 0, **given: object) -> SamplingParams:
    params = StructuredOutputsParams(**given)
    return SamplingParams(temperature=temperature, n=n, seed=seed, max_tokens=150, structured_outputs=params)


def follows(text: str, **given: object) -> bool:
    match given:
        case {"json": _}:
            value = json.loads(text)
            return (
                {*value} == {"name", "ages", "kind"}
                and isinstance(value["name"], str)
                and len(value["name"]) <= 12
                and 1 <= len(value["ages"]) <= 3
                and all(type(age) is int for age in value["ages"])
                and value["kind"] in ("cat", "dog")
            )
        case {"json_object": True}:
            return isinstance(json.loads(text), dict)
        case {"regex": regex}:
            return re.fullmatch(regex, text) is not None
        case {"choice": choices}:
            return text in choices
        case {"grammar": grammar}:
            return re.fullmatch(r"ab[cd]+e" if grammar == GBNF else r"\(*x\)*", text) is not None
    raise AssertionError(given)


GIVEN = [
    {"json": SCHEMA},
    {"json": json.dumps(SCHEMA)},
    {"regex": REGEX},
    {"choice": CHOICES},
    {"grammar": GRAMMAR},
    {"grammar": GBNF},
]


def test_each_kind_in_one_batch_beside_a_request_without(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=20)
    (alone,) = llm.generate([PROMPT], free)
    params = [structured(temperature, **given) for given in GIVEN for temperature in (0.0, 1.5)]
    outs = llm.generate([PROMPT] * (len(params) + 1), [*params, free])
    for out, request in zip(outs, params, strict=False):
        kind, text = request.structured_outputs.source
        given = {kind: json.loads(text) if kind in ("choice",) else text}
        output = out.outputs[0]
        if output.finish_reason == "stop":
            assert follows(output.text, **given), output.text
    ended = [out.outputs[0].finish_reason for out in outs[:-1]]
    assert ended.count("stop") >= len(GIVEN)
    assert outs[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert_idle(llm)


def test_an_output_ends_when_nothing_more_may_come(llm: LLM) -> None:
    params = structured(choice=["cat"], temperature=0.0)
    (out,) = llm.generate([PROMPT], params)
    assert (out.outputs[0].text, out.outputs[0].finish_reason) == ("cat", "stop")


def test_several_outputs_have_states_of_their_own(llm: LLM) -> None:
    (out,) = llm.generate([PROMPT], structured(n=4, temperature=2.0, regex=REGEX))
    texts = [output.text for output in out.outputs]
    assert all(follows(text, regex=REGEX) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("policy", ["streaming_llm", "shares(surrogate)"])
def test_under_compression_and_preemption(real_dir: Path, policy: str) -> None:
    """A pool too small for all: requests are preempted and compressed within their outputs."""
    compression = CompressionConfig(policy, budget=64, interval=16, recent=16)
    llm = LLM(real_dir, num_blocks=14, max_model_len=200, max_num_seqs=4, enable_prefix_caching=False)
    given = {"regex": r"([a-z]{1,8}, ){30}end"}
    params = [structured(1.0, seed=seed, **given) for seed in range(4)]
    outs = llm.generate([PROMPT * 4] * 4, params, compression)
    assert sum(llm.stats().totals.preemptions.values()) > 0
    assert all(out.metrics.tokens_evicted > 0 for out in outs)
    for out in outs:
        text = out.outputs[0].text
        if out.outputs[0].finish_reason == "stop":
            assert follows(text, **given)
        else:
            assert re.fullmatch(r"([a-z]{1,8}, )*[a-z]{0,8},?", text)
    assert_idle(llm)


def test_drafts_do_not_change_outputs(real_dir: Path) -> None:
    params = [structured(0.0, **given) for given in GIVEN]
    plain, drafting = (
        LLM(real_dir, num_blocks=64, max_model_len=512, dtype="float32", **more)
        for more in ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}})
    )
    token_ids = [
        [out.outputs[0].token_ids for out in llm.generate([PROMPT] * len(params), params)]
        for llm in (plain, drafting)
    ]
    assert token_ids[0] == token_ids[1]
    assert drafting.stats().totals.speculation.num_draft_tokens > 0


def test_the_mask_is_what_the_grammar_allows(llm: LLM) -> None:
    """Compared with every token of the vocabulary, tried alone."""
    vocab = llm.loaded.vocab_size
    begun = llm.engine.feature(StructuredOutputs).grammars.begin(StructuredOutputsParams(regex="[ab]+c"))
    logits = torch.zeros(2, vocab)
    begun.restrict(logits, [1], [begun])
    assert (logits[0] == 0).all()
    allowed = {i for i in range(vocab) if logits[1, i] == 0}
    texts = {i: llm.tokenizer.decode([i]) for i in range(vocab)}
    assert allowed == {i for i, text in texts.items() if re.fullmatch(r"[ab]+c?", text)}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "has nothing; pass exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "json_object": True}, "has regex and json_object; pass exactly one"),
        ({"choice": []}, "choice is '\\[\\]'; pass a list of non-empty strings"),
        ({"regex": "a" * (1 << 20) + "b"}, "has 1048577 characters, at most 1048576"),
    ],
)
def test_what_is_given_is_checked(given: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"json": "{"}, "the JSON schema cannot be followed: Expecting property name"),
        ({"json": {"type": "strin"}}, "Invalid type: strin; change it"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"regex": "(a"}, "the regular expression cannot be followed: .*unclosed group"),
        ({"json": {"$ref": "#"}}, "no JSON value follows it"),
        ({"regex": r"[^\s\S]"}, "no text follows it; change it"),
        ({"grammar": "start: start"}, "`start` never ends"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"json": "[" * 100_000}, "the JSON schema cannot be followed"),
    ],
)
def test_a_bad_grammar_is_refused_and_leaves_no_trace(llm: LLM, given: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error):
        llm.generate([PROMPT], structured(**given))
    assert_idle(llm)


PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "string", "maxLength": 8}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("given", "options", "field"),
    [
        ({"json": PAIR}, {"bad_words": ["{", '{"']}, "bad_words"),
        ({"json": PAIR}, {"bad_words": ["a", '"a', 'a"', '{"a', '"a"']}, "bad_words"),
        ({"choice": ["a"]}, {"bad_words": ["a"]}, "bad_words"),
        ({"choice": ["cat"]}, {"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"choice": ["a"]}, {"stop_token_ids": [*range(1000)], "min_tokens": 3}, "min_tokens"),
        ({"json": PAIR}, {"bad_words": ["x"]}, None),
        ({"json": {"enum": ["a   b"]}}, {"bad_words": ["x"]}, None),
        ({"regex": "a {3}b"}, {"bad_words": ["x"]}, None),
        ({"choice": ["yes", "no"]}, {"bad_words": ["y", "ye", "yes"]}, None),
        ({"json": PAIR}, {"stop_token_ids": [*range(20, 60)], "min_tokens": 2}, None),
    ],
    ids=str,
)
def test_options_that_leave_no_output_are_refused_before_it_begins(
    llm: LLM, given: dict[str, object], options: dict[str, object], field: str | None
) -> None:
    params = SamplingParams(
        temperature=1.5, seed=0, max_tokens=40, structured_outputs=StructuredOutputsParams(**given), **options
    )
    if field is None:
        assert llm.generate([PROMPT], params)[0].outputs[0].finish_reason in ("stop", "length")
        return
    with pytest.raises(InvalidArgumentError, match="leave no token that may come") as refused:
        llm.generate([PROMPT], params)
    assert refused.value.field == field
    assert_idle(llm)


def test_a_grammar_that_explodes_ends_its_request_alone(llm: LLM) -> None:
    deep = "x".join(["(a|b|ab|ba|aab)*"] * 40)
    outs = llm.generate([PROMPT] * 2, [structured(regex=rf"({deep})" * 8), structured(choice=["cat"])])
    assert outs[1].outputs[0].text == "cat"
    assert_idle(llm)


def test_a_model_without_tokenizer_refuses(tiny_dir) -> None:
    llm = LLM(tiny_dir("llama"), num_blocks=16)
    with pytest.raises(InvalidArgumentError, match="structured_outputs needs an end-of-sequence token"):
        llm.generate(tiny.prompts((5,)), structured(choice=["a"]))


def test_a_prepared_grammar_is_not_made_when_its_request_is_added(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, free = structured(choice=["prepared"]), SamplingParams()
    plain, spec = (RequestSpec(prompt_token_ids=[1, 2], params=each) for each in (free, params))
    assert llm.engine.factory.preparations(plain) == []
    (prepare,) = llm.engine.factory.preparations(spec)
    prepare()
    monkeypatch.setattr(Grammars, "_made", lambda *_: pytest.fail("made by the engine's thread"))
    (out,) = llm.generate([PROMPT], params)
    assert out.outputs[0].text == "prepared"


def test_the_next_mask_is_begun_with_the_last_token_if_that_used_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = grammar._threads()
    submit = mock.Mock(wraps=threads.submit)
    monkeypatch.setattr(threads, "submit", submit)
    token = llm.tokenizer.encode("a", add_special_tokens=False)[0]
    begun = llm.engine.feature(StructuredOutputs).grammars.begin(StructuredOutputsParams(regex="[ab]+c"))
    counts = []
    for uses_mask in (False, True, True, False, False):
        if uses_mask:
            begun.restrict(torch.zeros(1, llm.loaded.vocab_size), [0], [begun])
        counts.append(submit.call_count)
        begun.take(token)
    assert counts == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_the_likeliest_token_is_taken_without_a_mask_just_where_the_mask_allows_it(
    llm: LLM, given: dict[str, object]
) -> None:
    """Every token alone, along one output."""
    vocab = llm.loaded.vocab_size
    params = structured(0.0, **given)
    output = llm.engine.feature(StructuredOutputs).grammars.begin(params.structured_outputs)
    rng = torch.Generator().manual_seed(0)
    is_complete = False
    while not is_complete:
        logits = torch.zeros(1, vocab)
        output.restrict(logits, [0], [output])
        row = SampleRow(params, [0], [], (), None, output)
        allowed = (logits[0] == 0).nonzero()[:, 0]
        tried = {*torch.randperm(vocab, generator=rng)[:200].tolist(), *allowed[:200].tolist()}
        assert {token for token in tried if row.takes(token)} == tried & {*allowed.tolist()}
        is_complete = output.take(int(allowed[torch.randint(len(allowed), (), generator=rng)]))
