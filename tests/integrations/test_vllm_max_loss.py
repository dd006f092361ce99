"""max_loss inside vLLM: of the engine and of a request, by the length of its prompt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from curves import curve
from list_pool import FakeRequest, ListPool

from kvreclaim.compression_settings import CONTENTS
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.scheduler.ledger import Ledger
from kvreclaim.integrations.vllm.settings.max_loss import check_cache_dtype
from kvreclaim.integrations.vllm.settings.options import KEY, Options
from kvreclaim.testing.toys import model_facts, query_stats

CURVE = curve(
    "knorm",
    {
        ("prose", 256): {160: 0.04, 208: 0.01},
        ("lookups", 256): {160: 0.2, 208: 0.04},
        ("prose", 448): {160: 0.3, 256: 0.04},
        ("lookups", 448): {160: 0.3, 256: 0.05},
    },
    {"int8": {(content, length): {length: 0.0} for content in CONTENTS for length in (256, 448)}},
)
SIZE = 32


@pytest.fixture
def file(tmp_path: Path) -> str:
    query_stats(model_facts(2)).with_curve(CURVE).save(tmp_path / "curve.safetensors")
    return str(tmp_path / "curve.safetensors")


def read(**fields: Any) -> Options:
    return Options.read(fields, "the test")


def budget_of(options: Options, wanted: Any, num_tokens: int) -> int | None:
    """The budget that the scheduler computes; None: everything stays."""
    extra = None if wanted is None else {KEY: wanted}
    found = options.of_prompt(options.of_request(extra), num_tokens, SIZE)
    ledger = Ledger(options, ListPool(8, SIZE), SIZE, 2048)
    assert ledger._open(FakeRequest("a", num_tokens, wanted)).settings == found
    return None if found is None else found.budget


@pytest.mark.parametrize("num_tokens", [250, 257, 448, 449])
@pytest.mark.parametrize("content", [None, "prose", "lookups"])
@pytest.mark.parametrize("max_loss", [0.01, 0.04, 0.05])
def test_the_budget_is_the_curves_in_whole_blocks(file, num_tokens, content, max_loss) -> None:
    """The engine's loss holds, in another process too; a request's own may take its place."""
    promised = CURVE.promised("auto", max_loss, num_tokens, content)
    expected = None if promised is None else -(-promised // SIZE) * SIZE
    own = read(max_loss=max_loss, content=content, stats=file)
    assert own.settings.policy == "knorm"
    assert Options.read(own.as_json(), "a worker") == own
    assert budget_of(own, None, num_tokens) == expected
    assert budget_of(own, {"budget": 192}, num_tokens) == 192
    plain = read(policy="knorm", budget=300, stats=file)
    assert budget_of(plain, {"max_loss": max_loss, "content": content}, num_tokens) == expected


def test_a_promise_that_the_pool_was_not_sized_for_is_refused(file) -> None:
    options = read(policy="knorm", budget=200, stats=file)
    assert budget_of(options, {"max_loss": 0.05, "content": "prose"}, 250) == 160
    with pytest.raises(InvalidArgumentError, match=r"takes 224 tokens .* started with 200; allow more loss"):
        options.of_prompt(options.of_request({KEY: {"max_loss": 0.05}}), 250, SIZE)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_loss": 2}, "max_loss is 2"),
        ({"max_loss": 0.1, "budget": 256}, "which chooses a budget; leave one out"),
        ({"max_loss": 0.1, "interval": 64}, "interval is 64, but losses are measured with 128"),
        ({"max_loss": 0.1, "policy": "random"}, "measured under 'knorm'"),
        ({"content": "prose"}, "but max_loss is None"),
        ({"max_loss": 0.1, "content": "code"}, "content is 'code'"),
    ],
)
def test_what_cannot_be_promised_is_refused(file, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        read(stats=file, **fields)
    with pytest.raises(InvalidArgumentError, match=words):
        read(policy="knorm", stats=file).of_request({KEY: fields})


def test_without_a_curve(file, tmp_path) -> None:
    with pytest.raises(InvalidArgumentError, match="started without statistics; run"):
        read(max_loss=0.1)
    with pytest.raises(InvalidArgumentError, match="started without statistics; run"):
        read(policy="knorm").of_request({KEY: {"max_loss": 0.1}})
    bare = tmp_path / "bare.safetensors"
    query_stats(model_facts(2)).save(bare)
    with pytest.raises(InvalidArgumentError, match="holds no loss curve; run"):
        read(max_loss=0.1, stats=str(bare))


def test_keys_and_values_are_stored_as_when_losses_were_measured(file) -> None:
    settings = read(max_loss=0.1, stats=file).settings
    unlike = [("fp8", False), ("int8_per_token_head", False)]  # other scales than ours, so other losses
    for dtype, fits in [("auto", True), ("bfloat16", True), *unlike]:
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=dtype),
            model_config=SimpleNamespace(dtype="torch.bfloat16"),
        )
        if fits:
            check_cache_dtype(settings, config)
            continue
        with pytest.raises(
            InvalidArgumentError,
            match=f"own formats are not measured, and --kv-cache-dtype is {dtype}; leave it",
        ):
            check_cache_dtype(settings, config)
