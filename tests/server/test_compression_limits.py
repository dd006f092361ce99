"""Values of `kv_compression` that a request may have: the operator's bounds, in both dialects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx2
import pytest
from running import MODEL, Running, running_server

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.compression.registry import policy_names
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.shared.compression import check_budget, check_limits

PROMPT = [5 + i % 200 for i in range(150)]
BODIES = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "GO wind " * 80}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "GO wind " * 80}]},
}
SMALL = {"policy": "knorm", "budget": 64, "interval": 16, "sinks": 2, "recent": 16}
LIMITS = ServerConfig(served_model_name=("m",), max_kv_budget=64)
REFUSED = [
    (
        {**SMALL, "interval": 15},
        "kv_compression: interval is 15 tokens, but this server allows no interval below 16; "
        "ask for 16 or more.",
    ),
    (
        {**SMALL, "policy": "snapkv(window=65)"},
        "kv_compression: policy 'snapkv(window=65)' looks back on 65 queries, but this server keeps 64 at "
        "most; ask for a window of 64 or less.",
    ),
    (
        {**SMALL, "budget": 65},
        "kv_compression: budget is 65 tokens, but this server keeps 64 at most; ask for 64 or less.",
    ),
]


@pytest.fixture(scope="module")
def bounded() -> Iterator[Running]:
    """A server that compresses only where a request has kv_compression."""
    with running_server(LLM(demo_model(), num_blocks=128), max_kv_budget=64) as running:
        yield running


def ask(server: Running, path: str, compression: dict) -> httpx2.Response:
    body = {"model": MODEL, "max_tokens": 2, **BODIES[path], "kv_compression": compression}
    return httpx2.post(server.base_url + path, json=body, timeout=60)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("compression", "sentence"), REFUSED, ids=["pass", "window", "kept"])
def test_what_is_beyond_is_one_sentence(
    bounded: Running, path: str, compression: dict, sentence: str
) -> None:
    answer = ask(bounded, path, compression)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"] == sentence
    assert error.get("param", "kv_compression") == "kv_compression"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("change", [{}, {"policy": "snapkv(window=64)"}], ids=["pass", "window"])
def test_what_is_at_the_bound_is_served(bounded: Running, path: str, change: dict) -> None:
    answer = ask(bounded, path, {**SMALL, **change})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["kv_cache"]["tokens_evicted"] > 0


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("policy", ["auto", "shares(knorm)", "ada_kv(knorm)", "pyramidkv", "snapkv"])
def test_neither_sinks_nor_recent_tokens_are_needed(bounded: Running, path: str, policy: str) -> None:
    answer = ask(bounded, path, {"policy": policy, "budget": 16, "interval": 16, "sinks": 0, "recent": 0})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["kv_cache"]["tokens_evicted"] > 0


def test_the_window_inside_a_wrapper_counts() -> None:
    config = CompressionConfig("segments(snapkv(window=65))", 64, 16, 2, 16)
    with pytest.raises(InvalidArgumentError, match="looks back on 65 queries"):
        check_limits(config, None, LIMITS)


def test_the_servers_own_settings_are_never_refused() -> None:
    """Only a value beyond both the bounds and the operator's own is refused."""
    own = CompressionConfig("snapkv(window=100)", budget=200, interval=4, sinks=2, recent=16)
    check_limits(own, own, LIMITS)
    check_limits(CompressionConfig("snapkv(window=90)", 190, 5, 2, 16), own, LIMITS)
    for config, message in (
        (CompressionConfig("knorm", 200, 3, 2, 16), "ask for 4 or more"),
        (CompressionConfig("snapkv(window=101)", 200, 4, 2, 16), "window of 100 or less"),
        (CompressionConfig("full", 200), "'full' keeps every token, but this server keeps 200 at most"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            check_limits(config, own, LIMITS)


@pytest.fixture(scope="module")
def in_shares() -> Iterator[Running]:
    """Keeps half of each prompt, and has a limit below."""
    own = CompressionConfig("knorm", "50%", 16, 2, 16)
    with running_server(LLM(demo_model(), num_blocks=128, compression=own), max_kv_budget=48) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_share_is_held_to_the_limit_once_its_prompt_is_known(
    bounded: Running, path: str, stream: bool
) -> None:
    served = ask(bounded, path, {**SMALL, "budget": "1%"})
    assert served.status_code == 200, served.text
    assert served.json()["usage"]["kv_cache"]["budget"] == 32  # 2 sinks, 16 recent tokens and one more
    body = {"model": MODEL, "max_tokens": 2, "stream": stream, **BODIES[path]}
    refused = httpx2.post(
        bounded.base_url + path, json={**body, "kv_compression": {**SMALL, "budget": 0.9}}, timeout=60
    )
    assert refused.status_code == 400, refused.text
    message = refused.json()["error"]["message"]
    assert message.startswith("kv_compression: budget is 90%, ")
    assert message.endswith(" of this prompt, but this server keeps 64 at most; ask for 64 or less.")


def test_a_servers_share_allows_what_it_gives_the_prompt(in_shares: Running) -> None:
    """Half of 150 tokens is 64 in whole blocks."""
    path = "/v1/completions"
    for budget in (64, "50%", "45%"):
        assert ask(in_shares, path, {**SMALL, "budget": budget}).status_code == 200
    for budget, given in ((65, "65 tokens"), (100_000, "100000 tokens"), ("60%", "60%, 80 tokens of this")):
        refused = ask(in_shares, path, {**SMALL, "budget": budget})
        assert refused.status_code == 400, refused.text
        assert f"budget is {given}" in refused.json()["error"]["message"]
        assert "keeps 64 at most; ask for 64 or less" in refused.json()["error"]["message"]
    own = httpx2.post(in_shares.base_url + path, json={"model": MODEL, "max_tokens": 2, "prompt": PROMPT * 3})
    assert own.json()["usage"]["kv_cache"]["budget"] == 224
    over = ask(in_shares, path, {**SMALL, "budget": "200%"})
    assert "give a share up to 100%" in over.json()["error"]["message"]


def test_max_loss_is_held_to_the_servers_own() -> None:
    served = ServedModel.of(LLM(demo_model(), num_blocks=64))
    losing, tokens = CompressionConfig(max_loss=0.05), CompressionConfig("knorm", 64, recent=16)

    def check(config: CompressionConfig, own: CompressionConfig | None) -> None:
        spec = RequestSpec(prompt_token_ids=PROMPT, params=SamplingParams(), compression=config)
        check_budget(spec, replace(served, compression=own), 64)

    for config, own in ((losing, losing), (replace(losing, max_loss=0.1), losing), (tokens, losing)):
        check(config, own)
    for config, own in (
        (losing, None),
        (losing, tokens),
        (replace(losing, max_loss=0.01), losing),
        (losing, replace(losing, content="prose")),
        (replace(tokens, budget=65), losing),
    ):
        with pytest.raises(ApiError, match="this server keeps 64 at most; ask for 64 or less"):
            check(config, own)
    check(replace(tokens, budget=200), replace(tokens, budget=200))
    with pytest.raises(ApiError, match="budget is 201 tokens, but this server keeps 200 at most"):
        check(replace(tokens, budget=201), replace(tokens, budget=200))


def test_keeping_everything_is_no_more_than_a_server_does_that_compresses_nothing() -> None:
    check_limits(CompressionConfig("full", 64, recent=16), None, LIMITS)
    check_limits(
        CompressionConfig("full"), CompressionConfig("knorm"), ServerConfig(served_model_name=("m",))
    )


@pytest.mark.parametrize("path", BODIES)
def test_a_budget_that_chooses_itself_is_served_with_verify(bounded: Running, path: str) -> None:
    compression = {"policy": "query_mixture", "interval": 16, "sinks": 2, "recent": 16, "budget": "auto"}
    answer = ask(bounded, path, {**compression, "verify": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["kv_cache"]["tokens_evicted"] == 0
    refused = ask(bounded, path, compression)
    assert refused.status_code == 400
    assert "budget is 'auto', but verify is False" in refused.json()["error"]["message"]


def test_verify_keeps_every_token_where_the_server_would_not() -> None:
    own, verified = (
        CompressionConfig("knorm", 64, 16, 2, 16),
        CompressionConfig("knorm", 64, verify=True, recent=16),
    )
    with pytest.raises(
        InvalidArgumentError, match=r"^verify keeps every token, but this server keeps 64 at most"
    ):
        check_limits(verified, own, LIMITS)
    itself = CompressionConfig("knorm", "auto", 16, 2, 16, verify=True)
    with pytest.raises(InvalidArgumentError, match=r"^verify keeps every token"):
        check_limits(itself, own, LIMITS)
    check_limits(verified, None, LIMITS)
    check_limits(verified, verified, LIMITS)
    check_limits(own, verified, LIMITS)


def test_a_policy_without_passes_has_no_interval() -> None:
    check_limits(CompressionConfig("full", interval=1), None, ServerConfig(served_model_name=("m",)))


@pytest.mark.parametrize("policy", policy_names())
def test_the_defaults_take_every_policy_as_it_comes(policy: str) -> None:
    check_limits(CompressionConfig(policy), None, ServerConfig(served_model_name=("m",)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"interval": 1}, "below 16"), ({"interval": 16}, "looks back on 1024 queries")],
)
def test_the_defaults_refuse_a_pass_per_token_and_long_windows(fields: dict, message: str) -> None:
    config = CompressionConfig("snapkv(window=1024)", budget=2000, **fields)
    with pytest.raises(InvalidArgumentError, match=message):
        check_limits(config, None, ServerConfig(served_model_name=("m",)))


def test_an_embedded_engine_has_no_such_bounds() -> None:
    llm = LLM(demo_model(), num_blocks=64)
    often = CompressionConfig("snapkv(window=100)", budget=128, interval=1, sinks=2, recent=16)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [output] = llm.generate([PROMPT], params, often)
    assert output.metrics.tokens_evicted > len(PROMPT) - 128, "a pass for the prompt and one per token"


class TestAuto:
    """Without a policy, it is the one of the model's statistics; a request may name it, as `auto`."""

    @pytest.mark.parametrize("policy", [{}, {"policy": "auto"}])
    @pytest.mark.parametrize("path", BODIES)
    def test_answers_name_the_policy_that_it_is(self, bounded: Running, path: str, policy: dict) -> None:
        answer = ask(
            bounded, path, {**SMALL, **policy} if policy else {k: SMALL[k] for k in SMALL if k != "policy"}
        )
        assert answer.status_code == 200, answer.text
        best = LLM(demo_model(), num_blocks=8).resolved(CompressionConfig()).policy
        assert answer.json()["usage"]["kv_cache"]["policy"] == best

    def test_without_statistics_the_answer_says_what_to_run(self, tiny_dir) -> None:
        with running_server(LLM(tiny_dir("llama"), device="cpu", num_blocks=64)) as server:
            for path in ("/v1/completions", "/v1/messages"):
                answer = ask(server, path, {"budget": 64, "recent": 16})
                assert answer.status_code == 400
                assert "run `kvreclaim calibrate` for this model" in answer.json()["error"]["message"]
