"""Responses that are made in the background: read, followed, cancelled and deleted by id."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from running import MODEL, Running, openai_client, running_server
from speaking import biased
from steering import assert_empty, halted, until

from kvreclaim import LLM

TEMPLATE = "{% for m in messages %} {{ m.content }}{% endfor %}"
LIMIT = 100_000
BODY = {"model": MODEL, "input": "w20", "background": True}


@pytest.fixture(scope="module")
def server(speaker: LLM) -> Iterator[Running]:
    with running_server(speaker, api_keys=("a", "b"), max_stored_responses_bytes=LIMIT) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai_client(server, api_key="a") as client:
        yield client


def words(*output: str) -> dict[str, object]:
    return {"extra_body": biased(*output)}


def ended(client: openai.OpenAI, response_id: str) -> openai.types.responses.Response:
    until(lambda: client.responses.retrieve(response_id).status != "in_progress")
    return client.responses.retrieve(response_id)


def test_it_equals_one_that_its_client_waits_for(client: openai.OpenAI) -> None:
    made = client.responses.create(**BODY, **words("Let", "me"))
    assert (made.status, made.background, made.output) == ("in_progress", True, [])
    found = ended(client, made.id)
    waited = client.responses.create(model=MODEL, input="w20", **words("Let", "me"))
    assert found.status == waited.status == "completed"
    assert found.output_text == waited.output_text == "Let me"
    assert found.usage is not None
    assert found.usage.output_tokens == waited.usage.output_tokens
    assert client.responses.cancel(made.id).status == "completed"
    again = client.responses.create(model=MODEL, input="w21", previous_response_id=made.id, **words("look."))
    assert again.output_text == "look."


def test_its_client_leaves_and_follows_it_later(server: Running, client: openai.OpenAI) -> None:
    with halted(server) as wait:
        stream = client.responses.create(**BODY, stream=True, **words("Let", "me", "look."))
        first = next(iter(stream))
        stream.close()
        wait()
        assert client.responses.retrieve(first.response.id).status == "in_progress"
        with openai_client(server, api_key="b") as other, pytest.raises(openai.NotFoundError):
            other.responses.retrieve(first.response.id)
    everything = list(client.responses.retrieve(first.response.id, stream=True))
    assert [event.sequence_number for event in everything] == list(range(len(everything)))
    assert everything[-1].type == "response.completed"
    assert everything[-1].response.output_text == "Let me look."
    rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=4))
    assert rest == everything[5:]


def test_it_is_cancelled(server: Running, client: openai.OpenAI) -> None:
    with halted(server) as wait:
        made = client.responses.create(**BODY, **words("Let", "me", "look."))
        wait()
        found = client.responses.cancel(made.id)
        assert_empty(server)
    assert found.status == "cancelled"
    assert found.output_text.startswith("Let me")
    assert found == client.responses.retrieve(made.id) == client.responses.cancel(made.id)
    last = list(client.responses.retrieve(made.id, stream=True))[-1]
    assert last.response.status == "cancelled"


def test_it_is_deleted_while_it_runs(server: Running, client: openai.OpenAI) -> None:
    with halted(server) as wait:
        made = client.responses.create(**BODY, **words("Let", "me", "look."))
        wait()
        client.responses.delete(made.id)
        assert_empty(server)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_events_are_forgotten_and_the_response_stays(server: Running, client: openai.OpenAI) -> None:
    first = client.responses.create(**BODY, **words("Let", "me"))
    ended(client, first.id)
    for _ in range(LIMIT // server.app.state.background.get(*own(server, first.id)).num_bytes + 2):
        ended(client, client.responses.create(**BODY, **words("Let", "me")).id)
    assert client.responses.retrieve(first.id).output_text == "Let me"
    with pytest.raises(openai.BadRequestError, match="no events"):
        client.responses.retrieve(first.id, stream=True)


def own(server: Running, response_id: str) -> tuple[str | None, str]:
    """The key of a background response, in the tenant's name."""
    return next(key for key in server.app.state.background._by_id if key[1] == response_id)


def test_a_refusal_comes_at_once(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="store"):
        client.responses.create(**BODY, store=False)
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.responses.create(**{**BODY, "input": "w20 " * 600})
    made = client.responses.create(**BODY, **words("me"))
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.get(f"/responses/{made.id}?starting_after=3", cast_to=object)
