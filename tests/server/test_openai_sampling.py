"""Every field that says how tokens are drawn: the answer is the engine's with the same parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from talking import EOS, GREEDY, PROMPT, Talker, talker

from kvreclaim import SamplingParams

SEEDED = {"seed": 11, "max_tokens": 12}
LONG = GREEDY | {"max_tokens": 60}
"""So many that a random model says some token twice, which is what penalties are for."""

SAMPLING: dict[str, tuple[dict[str, Any], Any, Any]] = {
    # field: (the other fields, the value that is set, the engine's value where it has another form)
    "max_tokens": ({"temperature": 0.0, "max_tokens": 12}, 5, 5),
    "temperature": (SEEDED, 0.0, 0.0),
    "top_p": (SEEDED, 0.05, 0.05),
    "top_k": (SEEDED, 1, 1),
    "min_p": (SEEDED, 1.0, 1.0),
    "seed": (SEEDED, 12, 12),
    "repetition_penalty": (LONG, 50.0, 50.0),
    "presence_penalty": (LONG, 2.0, 2.0),
    "frequency_penalty": (LONG, 2.0, 2.0),
    "logit_bias": (GREEDY, {"65": 100}, {65: 100}),
    "stop": (GREEDY | {"logit_bias": {"65": 100}}, ["bb"], ["bb"]),
    "stop_token_ids": (GREEDY | {"logit_bias": {"65": 100}}, [65], [65]),
    "ignore_eos": (GREEDY | {"logit_bias": {str(EOS): 100}}, True, True),
    "min_tokens": (GREEDY | {"logit_bias": {str(EOS): 100}}, 3, 3),
    "n": (SEEDED, 3, 3),
    "allowed_token_ids": (GREEDY, [65, 66, 67], [65, 66, 67]),
    "bad_words": (GREEDY | {"logit_bias": {"65": 100}}, ["b", "bb"], ["b", "bb"]),
    "skip_special_tokens": (GREEDY | {"logit_bias": {str(EOS): 100}, "ignore_eos": True}, False, False),
    "include_stop_str_in_output": (GREEDY | {"logit_bias": {"65": 100}, "stop": ["bb"]}, True, True),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talker(tmp_path_factory.mktemp("talker")) as server:
        yield server


@pytest.mark.parametrize("field", SAMPLING)
def test_how_tokens_are_drawn(server: Talker, field: str):
    """With the field the answer is another one, and the one that the engine gives."""
    base, value, engine_value = SAMPLING[field]

    def expected(**fields: Any) -> list[tuple[str, str]]:
        bias = {int(token): bias for token, bias in fields.pop("logit_bias", {}).items()}
        params = SamplingParams(**fields, logit_bias=bias or None)
        outputs = server.oracle.generate(PROMPT, params)[0].outputs
        return [(output.text, output.finish_reason) for output in outputs]

    def answered(**fields: Any) -> list[tuple[str, str]]:
        return [(c["text"], c["finish_reason"]) for c in server.completion(**fields)["choices"]]

    without, given = answered(**base), answered(**{**base, field: value})
    assert given != without
    assert without == expected(**base)
    assert given == expected(**{**base, field: engine_value})


def test_seeds_are_signed_or_any(server: Talker):
    """-1 is as good as none; every other 64-bit integer is a seed of its own."""
    assert SamplingParams(seed=-1) == SamplingParams()
    asked = {"max_tokens": 12, "temperature": 1.5}
    for seed in (-5, -(2**63), 2**64 - 1):
        [output] = server.oracle.generate(PROMPT, SamplingParams(**asked, seed=seed))[0].outputs
        for _ in range(2):
            assert server.completion(**asked, seed=seed)["choices"][0]["text"] == output.text
    texts = {server.completion(**asked, seed=seed)["choices"][0]["text"] for seed in (-1, -1, -5, 5)}
    assert len(texts) == 4
