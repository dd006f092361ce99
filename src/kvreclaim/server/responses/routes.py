"""POST /v1/responses, stored responses under /v1/responses/{response_id}, and the schemas of both."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field
from pydantic_core import from_json
from starlette.responses import Response

from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import KVCacheUsage, Responses, ResponseSchema, streamed_body
from kvreclaim.server.base.identity import Tenant
from kvreclaim.server.http.events import json_of, stream_events
from kvreclaim.server.openai.chat import prompt_of
from kvreclaim.server.openai.prompts import check_options
from kvreclaim.server.openai.schemas import (
    ERRORS,
    ChatTokenLogprob,
    CompletionTokensDetails,
    PromptTokensDetails,
)
from kvreclaim.server.responses.answer import ROUTE, ResponseAnswer
from kvreclaim.server.responses.background import BackgroundResponse, BackgroundResponses
from kvreclaim.server.responses.fields import ResponsesRequest
from kvreclaim.server.responses.store import Kept, ResponseStore
from kvreclaim.server.responses.translate import own_names, translated
from kvreclaim.server.shared.bodies import BodyRoute
from kvreclaim.server.shared.service import Service, ServiceDep, TenantDep

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseSchema):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputReasoning(ResponseSchema):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(ResponseSchema):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputCall(ResponseSchema):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningOutput(ResponseSchema):
    """summary: always empty"""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[OutputReasoning]


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int


class ResponseUsage(ResponseSchema):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int
    kv_cache: KVCacheUsage


class IncompleteDetails(ResponseSchema):
    reason: Literal["max_output_tokens"]


class ResponseFailure(ResponseSchema):
    """invalid_prompt: contradicting options of the request"""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponseObject(BaseModel):
    """Has the request's settings besides these fields, with defaults.

    store: whether it is stored
    usage: null if a stream failed
    """

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputCall | ReasoningOutput]
    store: bool
    usage: ResponseUsage | None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


router = APIRouter(tags=["openai"], route_class=BodyRoute)
STREAMED = streamed_body(ResponseObject, "`event:` and `data:` lines; the last event has the response")
STORED_ERRORS: Responses = {status: ERRORS[status] for status in (400, 401, 404, 503)}
ONE = ROUTE + "/{response_id}"


def store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def background_of(request: Request) -> BackgroundResponses:
    running: BackgroundResponses = request.app.state.background
    return running


StoreDep = Annotated[ResponseStore, Depends(store_of)]
BackgroundDep = Annotated[BackgroundResponses, Depends(background_of)]


class Retrieval(ResponseSchema):
    """Options for reading a response. starting_after: sequence number of the last event that was seen."""

    stream: bool | None = None
    starting_after: int | None = Field(None, ge=0)


class ItemPage(ResponseSchema):
    """Pagination; the newest item comes first unless order is asc."""

    limit: int = Field(20, ge=1, le=100)
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


@router.post(ROUTE, responses=ERRORS | STREAMED, response_class=Response)
async def create_response(
    body: ResponsesRequest,
    request: Request,
    service: ServiceDep,
    tenant: TenantDep,
    store: StoreDep,
    background: BackgroundDep,
) -> Response:
    """Generate the assistant's next turn, and store it for the turn after."""
    service.check_model(body.model)
    if body.background and not body.kept:
        raise ApiError(
            400, "background is true with store false, but it is read from the store; leave one out.", "store"
        )
    turn = await service.workers.run(tenant.name, partial(translated, body, service, store, tenant))
    with own_names(turn.places):
        check_options(turn.chat, service, request.scope)
        service.check_room(tenant.name)
        prompt = await prompt_of(turn.chat, service, tenant)
    answer = ResponseAnswer(turn, service, store, request, prompt)
    if not body.background:
        return await answer.respond()
    made = await background.start(answer)
    if body.stream:
        return await stream_events(made.follow(-1), request)
    return _current(made)


@router.get(ONE, responses={200: {"model": ResponseObject}, **STORED_ERRORS}, response_class=Response)
async def retrieve_response(
    response_id: str,
    how: Annotated[Retrieval, Query()],
    request: Request,
    service: ServiceDep,
    tenant: TenantDep,
    store: StoreDep,
    background: BackgroundDep,
) -> Response:
    """Return a response, or the events of one that was made in the background."""
    if how.starting_after is not None and not how.stream:
        raise ApiError(400, "starting_after belongs to stream=true; leave it out.", "starting_after")
    made = background.get(tenant.name, response_id)
    if made is not None and how.stream:
        after = -1 if how.starting_after is None else how.starting_after
        return await stream_events(made.follow(after), request)
    if made is not None:
        return _current(made)
    if how.stream:
        raise ApiError(
            400,
            "stream is true, but this response has no events: it was not made in the background, or that was "
            "long ago; leave stream out.",
            "stream",
        )
    kept = await _kept(response_id, service, tenant, store)
    return Response(kept.response, media_type="application/json")


@router.delete(ONE, responses=STORED_ERRORS)
async def delete_response(
    response_id: str, service: ServiceDep, tenant: TenantDep, store: StoreDep, background: BackgroundDep
) -> DeletedResponse:
    """Delete a response, cancelled if it runs; responses that continue it remain."""
    was_made = await background.delete(tenant.name, response_id)
    was_kept = await service.workers.run(tenant.name, partial(store.delete, tenant.name, response_id))
    if not (was_made or was_kept):
        raise _missing(response_id)
    return DeletedResponse(id=response_id)


@router.get(f"{ONE}/input_items", responses=STORED_ERRORS)
async def input_items(
    response_id: str,
    page: Annotated[ItemPage, Query()],
    service: ServiceDep,
    tenant: TenantDep,
    store: StoreDep,
) -> InputItemList:
    """List all items that a response answers, including those of the responses it continues."""
    kept = await _kept(response_id, service, tenant, store)
    items: list[dict[str, Any]] = from_json(kept.input)["items"]
    if page.order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if page.after is not None:
        if page.after not in ids:
            raise ApiError(400, f"after is {page.after!r}, which is the id of no item here.", "after")
        items = items[ids.index(page.after) + 1 :]
    shown = items[: page.limit]
    return InputItemList(
        data=shown,
        has_more=len(shown) < len(items),
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
    )


@router.post(
    f"{ONE}/cancel", responses={**STORED_ERRORS, 200: {"model": ResponseObject}}, response_class=Response
)
async def cancel_response(
    response_id: str, service: ServiceDep, tenant: TenantDep, store: StoreDep, background: BackgroundDep
) -> Response:
    """End a background response with its output so far; one that has ended stays as it is."""
    made = background.get(tenant.name, response_id)
    if made is not None:
        await made.cancel()
        return _current(made)
    kept = await _kept(response_id, service, tenant, store)
    if from_json(kept.response)["background"]:
        return Response(kept.response, media_type="application/json")
    raise ApiError(
        400,
        "only background responses can be cancelled; close the connection of another one while it runs.",
        "response_id",
    )


def _current(made: BackgroundResponse) -> Response:
    return Response(json_of(made.answer.response), media_type="application/json")


async def _kept(response_id: str, service: Service, tenant: Tenant, store: ResponseStore) -> Kept:
    """Raises: ApiError 404."""
    kept = await service.workers.run(tenant.name, partial(store.get, tenant.name, response_id))
    if kept is None:
        raise _missing(response_id)
    return kept


def _missing(response_id: str) -> ApiError:
    return ApiError(404, f"there is no stored response {response_id!r}.", "response_id")
