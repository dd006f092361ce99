"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import Fields, Listed, Responses
from kvreclaim.server.base.identity import Tenant
from kvreclaim.server.openai.messages import ConversationOptions, Messages, render
from kvreclaim.server.openai.schemas import ERRORS
from kvreclaim.server.shared.bodies import BodyRoute
from kvreclaim.server.shared.service import Service, ServiceDep, TenantDep

router = APIRouter(tags=["tokenizer"], route_class=BodyRoute)
TEXT_ERRORS: Responses = {status: ERRORS[status] for status in (400, 401, 404, 408, 413, 429)}


class TokenizeRequest(ConversationOptions):
    """A prompt, or messages with their options. content: llama.cpp's name of prompt."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Listed[int]


class DetokenizeResponse(BaseModel):
    """content: llama.cpp's name of prompt."""

    prompt: str
    content: str


OF_MESSAGES = tuple(ConversationOptions.model_fields)


@router.post("/tokenize", responses=TEXT_ERRORS, response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, service: ServiceDep, tenant: TenantDep) -> Response:
    """Tokenise a text, or a conversation with the chat template."""
    if body.model is not None:
        service.check_model(body.model)

    def work() -> TokenizeResponse:
        ids, strings = _ids(body, service), None
        if body.return_token_strs:
            strings = [str(token) for token in service.tokenizer.convert_ids_to_tokens(ids)]
        return TokenizeResponse(
            count=len(ids), max_model_len=service.max_model_len, tokens=ids, token_strs=strings
        )

    text = _text_of(body)
    return await _written(work, service, tenant, None if text is None else len(text))


async def _written(
    work: Callable[[], BaseModel], service: Service, tenant: Tenant, size: int | None
) -> Response:
    """Run the work and encode its answer in the same thread."""
    written = await service.workers.run(tenant.name, lambda: work().model_dump_json(), size=size)
    return Response(written, media_type="application/json")


def _text_of(body: TokenizeRequest) -> str | None:
    if body.content is None:
        return body.prompt
    if body.prompt is not None:
        raise ApiError(400, "content and prompt are both set; they are two names of one text.", "content")
    return body.content


def _ids(body: TokenizeRequest, service: Service) -> list[int]:
    prompt, messages = _text_of(body), body.messages
    if messages is not None and prompt is None:
        if body.add_special_tokens:
            raise ApiError(
                400,
                "add_special_tokens is true, but a template writes its own; remove it.",
                "add_special_tokens",
            )
        return render(messages, body, service)
    if prompt is None or messages is not None:
        raise ApiError(400, "pass either prompt or messages, and not both.", "prompt")
    for name in OF_MESSAGES:
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} belongs to messages, but a prompt is given; remove it.", name)
    special = body.add_special_tokens is not False
    return service.encode(prompt, add_special_tokens=special)


@router.post("/detokenize", responses=TEXT_ERRORS, response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, service: ServiceDep, tenant: TenantDep) -> Response:
    """Detokenise token ids, special tokens included."""
    if body.model is not None:
        service.check_model(body.model)
    size = service.engine.served.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise ApiError(400, f"tokens holds {wrong}; the model's ids go from 0 to {size - 1}.", "tokens")

    def work() -> DetokenizeResponse:
        text = str(service.tokenizer.decode(body.tokens))
        return DetokenizeResponse(prompt=text, content=text)

    return await _written(work, service, tenant, size=len(body.tokens))
