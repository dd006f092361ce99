"""Routes that clients of llama.cpp's server ask for, and the refusal of embeddings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from kvreclaim import __version__
from kvreclaim.server.base.errors import ApiError, OpenAIError
from kvreclaim.server.base.fields import Responses
from kvreclaim.server.openai.messages import ConversationOptions, Messages, rendered
from kvreclaim.server.openai.schemas import ERRORS
from kvreclaim.server.shared.bodies import BodyRoute
from kvreclaim.server.shared.service import ServiceDep, TenantDep

router = APIRouter(tags=["llama.cpp"], route_class=BodyRoute)
TEXT_ERRORS: Responses = {status: ERRORS[status] for status in (400, 401, 404, 408, 413, 429)}


class Props(BaseModel):
    """default_generation_settings: n_ctx, the longest sequence in tokens; total_slots: sequences of a step"""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


@router.get("/props", responses={401: {"model": OpenAIError}})
async def props(service: ServiceDep) -> Props:
    """Facts about the model and the server."""
    config, tokenizer = service.config, service.engine.tokenizer
    template = config.chat_template or getattr(tokenizer, "chat_template", None)
    return Props(
        default_generation_settings={"n_ctx": service.max_model_len, "params": {}},
        total_slots=service.engine.served.config["max_num_seqs"],
        model_alias=config.served_model_name[0],
        chat_template=None if template is None else str(template),
        bos_token=getattr(tokenizer, "bos_token", None),
        eos_token=getattr(tokenizer, "eos_token", None),
        modalities={"vision": False, "audio": False},
        build_info=f"kvreclaim {__version__}",
        is_sleeping=False,
    )


class TemplateRequest(ConversationOptions):
    messages: Messages
    model: str | None = None


class TemplateResponse(BaseModel):
    prompt: str


@router.post("/apply-template", responses=TEXT_ERRORS)
async def apply_template(body: TemplateRequest, service: ServiceDep, tenant: TenantDep) -> TemplateResponse:
    """Write a conversation with the chat template."""
    if body.model is not None:
        service.check_model(body.model)
    text = await service.workers.run(tenant.name, lambda: rendered(body.messages, body, service))
    return TemplateResponse(prompt=text)


@router.post("/v1/embeddings", responses={404: ERRORS[404]}, include_in_schema=False)
@router.post("/embeddings", responses={404: ERRORS[404]}, include_in_schema=False)
async def embeddings() -> None:
    """Raises: ApiError."""
    raise ApiError(
        404,
        "this server generates text and makes no embeddings; run an embedding model beside it, with "
        "`llama-server --embedding` or text-embeddings-inference.",
        code="not_supported",
    )
