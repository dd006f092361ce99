"""GET /v1/models, in one format for both dialects."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from kvreclaim.server.base.fields import Responses, ResponseSchema
from kvreclaim.server.base.model_names import Page
from kvreclaim.server.openai.schemas import ERRORS
from kvreclaim.server.shared.service import Service, ServiceDep

router = APIRouter(tags=["openai"])


class Model(ResponseSchema):
    """OpenAI's fields, Anthropic's, and vLLM's max_model_len."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kvreclaim"] = "kvreclaim"
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int


class ModelList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool
    first_id: str | None
    last_id: str | None


READ_ERRORS: Responses = {status: ERRORS[status] for status in (400, 401, 404)}


@router.get("/v1/models", responses=READ_ERRORS)
async def models(page: Annotated[Page, Query()], service: ServiceDep) -> ModelList:
    """List the names of the model."""
    return ModelList(**page.of(service.config.served_model_name, lambda name: _model(name, service)))


@router.get("/v1/models/{model_id:path}", responses=READ_ERRORS)
async def model(model_id: str, service: ServiceDep) -> Model:
    """One name of the model."""
    return _model(service.check_model(model_id), service)


def _model(name: str, service: Service) -> Model:
    created = int(service.started_s)
    return Model(
        id=name,
        created=created,
        max_model_len=service.max_model_len,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC),
        max_input_tokens=service.max_model_len - 1,
    )
