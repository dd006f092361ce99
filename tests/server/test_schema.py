"""Requests made from the server's own OpenAPI description: no 5xx, and nothing that it does not describe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from running import Running, running_server
from schemathesis import GenerationMode
from schemathesis import checks as known
from schemathesis.specs.openapi import checks as openapi
from steering import LIMIT_S, assert_empty

from kvreclaim import LLM, demo_model

CHECKS = (
    known.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_schema_conformance,
    openapi.response_headers_conformance,
)
EXAMPLES = 40
OPERATIONS = (
    "/health",
    "/version",
    "/load",
    "/metrics",
    "/kv_offload/status",
    "/reset_prefix_cache",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{model_id}",
    "/tokenize",
    "/detokenize",
)


@pytest.fixture(scope="module")
def described() -> Iterator[tuple[Running, schemathesis.BaseSchema]]:
    """Short sequences only, so that a request of the most tokens allowed is answered soon."""
    llm = LLM(demo_model(), num_blocks=512, max_num_seqs=64, max_model_len=128)
    with running_server(llm) as running:
        yield running, schemathesis.openapi.from_url(f"{running.base_url}/openapi.json")


def test_every_route_is_described(described) -> None:
    _, schema = described
    assert {found.ok().path for found in schema.get_all_operations()} >= set(OPERATIONS)


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", OPERATIONS)
def test_no_answer_is_a_surprise(described, path: str, mode: GenerationMode) -> None:
    """mode: requests that the description allows, or that it does not."""
    running, schema = described
    operation = next(found.ok() for found in schema.get_all_operations() if found.ok().path == path)
    if mode is GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("nothing about it can be wrong")

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        answer = case.call(timeout=LIMIT_S)
        case.validate_response(answer, checks=list(CHECKS))

    check()
    assert_empty(running)
