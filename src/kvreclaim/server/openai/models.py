"""GET /v1/models, in one format for both dialects."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from kvreclaim.server.base.fields import Responses, ResponseSchema
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


class Page(ResponseSchema):
    """Anthropic's pagination; limit None gives all."""

    limit: int | None = Field(None, ge=1, le=1000)
    after_id: str | None = None
    before_id: str | None = None


READ_ERRORS: Responses = {status: ERRORS[status] for status in (400, 401, 404)}


@router.get("/v1/models", responses=READ_ERRORS)
async def models(page: Annotated[Page, Query()], service: ServiceDep) -> ModelList:
    """List the names of the model."""
    names = list(service.config.served_model_name)
    start = names.index(service.check_model(page.after_id)) + 1 if page.after_id is not None else 0
    stop = names.index(service.check_model(page.before_id)) if page.before_id is not None else len(names)
    between = names[start:stop]
    limit = page.limit if page.limit is not None else len(names)
    backwards = page.before_id is not None and page.after_id is None
    shown = between[-limit:] if backwards else between[:limit]
    return ModelList(
        data=[_model(name, service) for name in shown],
        has_more=len(shown) < len(between),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )


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
