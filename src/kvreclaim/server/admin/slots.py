"""POST /slots/{name}: save and restore the cache of a prompt, as in llama.cpp's server.

Blocks belong to prompts, not to slots: the prompt identifies what is saved; the slot's name is only echoed.
"""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.offload.session import SessionInfo
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.base.errors import ApiError, OpenAIError, engine_fields
from kvreclaim.server.base.fields import MAX_INT32, Listed, PolicyOrSettings, Responses
from kvreclaim.server.base.identity import Tenant
from kvreclaim.server.openai.messages import ConversationOptions, Messages, render, system_counter
from kvreclaim.server.openai.schemas import ERRORS
from kvreclaim.server.shared.bodies import BodyRoute
from kvreclaim.server.shared.service import Service, ServiceDep, TenantDep

router = APIRouter(tags=["slots"], route_class=BodyRoute)
SLOT_ERRORS: Responses = {
    **{status: ERRORS[status] for status in (400, 401, 404, 408, 413, 429, 503)},
    409: {"model": OpenAIError, "description": "saved with another model, format or block size"},
}
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
KEYLESS = "all"
"""Folder used when there are no API keys."""


class SlotRequest(ConversationOptions):
    """A request to save or restore a slot.

    filename: without a path
    prompt or messages: the prompt with the blocks to save
    compress_prompt_at: save the compressed prefix of that many tokens instead
    kv_compression: as in the requests that made it
    """

    filename: str = Field(min_length=1, max_length=128)
    prompt: str | Listed[int] | None = None
    messages: Messages | None = None
    cache_salt: str | None = Field(None, min_length=1)
    kv_compression: PolicyOrSettings | None = None
    compress_prompt_at: int | None = Field(None, ge=1, le=MAX_INT32)


class SlotAnswer(BaseModel):
    """llama.cpp's fields; fields of other actions are omitted."""

    id_slot: str
    filename: str
    n_saved: int | None = None
    n_written: int | None = None
    n_restored: int | None = None
    n_read: int | None = None
    n_erased: int | None = None
    timings: dict[str, float] | None = None


@router.post("/slots/{name}", responses=SLOT_ERRORS, response_model_exclude_none=True)
async def slots(
    name: Annotated[str, Field(max_length=128)],
    action: Annotated[Literal["save", "restore", "erase"], Query()],
    body: SlotRequest,
    service: ServiceDep,
    tenant: TenantDep,
) -> SlotAnswer:
    """Save the cached blocks of a prompt to a file, restore them, or erase the file."""
    path = _path(body.filename, service, tenant)
    started, salt = time.perf_counter(), tenant.salt(body.cache_salt)
    _check_compression(action, body)
    if action == "erase":
        if not path.is_file():
            raise ApiError(404, f"there is no saved session {body.filename!r}.", "filename")
        path.unlink()
        return SlotAnswer(id_slot=name, filename=body.filename, n_erased=1)
    if action == "restore":
        info = await _run_in_engine(service, partial(_restore, path=path, salt=salt), body.filename)
        timings = {"restore_ms": 1000 * (time.perf_counter() - started)}
        moved = {"n_restored": info.num_tokens, "n_read": info.num_bytes}
        return SlotAnswer(id_slot=name, filename=body.filename, **moved, timings=timings)
    _check_room(path, service)
    tokens, compression = await service.workers.run(tenant.name, partial(_prompt_of, body, service))
    save = partial(
        _save,
        tokens=tokens,
        path=path,
        salt=salt,
        compression=compression,
        compress_prompt_at=body.compress_prompt_at,
    )
    info = await _run_in_engine(service, save, body.filename)
    timings = {"save_ms": 1000 * (time.perf_counter() - started)}
    moved = {"n_saved": info.num_tokens, "n_written": info.num_bytes}
    return SlotAnswer(id_slot=name, filename=body.filename, **moved, timings=timings)


def _path(filename: str, service: Service, tenant: Tenant) -> Path:
    """Path of a tenant's file of this name. Raises: ApiError."""
    root = service.config.slot_save_path
    if root is None:
        raise ApiError(404, "this server saves no sessions; start it with --slot-save-path DIRECTORY.")
    if NAME.fullmatch(filename) is None:
        raise ApiError(
            400,
            f"filename is {filename!r}; it may have 128 letters, digits, '.', '_' and '-', the first no '.'.",
            "filename",
        )
    return Path(root) / (tenant.name or KEYLESS) / filename


def _check_room(path: Path, service: Service) -> None:
    """Raises: ApiError 400 if the tenant has too many saved files."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    saved, most = [each for each in path.parent.iterdir() if each != path], service.config.max_saved_slots
    if len(saved) >= most:
        raise ApiError(400, f"{len(saved)} sessions are saved, at most {most} may be; erase one.", "filename")


def _prompt_of(body: SlotRequest, service: Service) -> tuple[list[int], CompressionConfig | None]:
    """Return the prompt's tokens, and the compression if a compressed prefix is saved. Raises: ApiError."""
    tokens = _tokens(body, service)
    if body.compress_prompt_at is None:
        return tokens, None
    num_system = system_counter(tokens, body.messages, body, service) if body.messages else None
    return tokens, service.compression(body.kv_compression, num_system)


def _tokens(body: SlotRequest, service: Service) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "pass either prompt or messages: what is cached of it is saved.", "prompt")
    if body.messages is not None:
        return render(body.messages, body, service)
    return service.encode(body.prompt) if isinstance(body.prompt, str) else list(body.prompt or ())


def _check_compression(action: str, body: SlotRequest) -> None:
    """Raises: ApiError 400 if compression fields are set but do not apply."""
    for name in ("compress_prompt_at", "kv_compression"):
        if action != "save" and getattr(body, name) is not None:
            raise ApiError(400, f"{name} says what to save; with action={action} leave it out.", name)
    if body.compress_prompt_at is None and body.kv_compression is not None:
        raise ApiError(
            400,
            "kv_compression is given without compress_prompt_at, and only a prefix compressed there can "
            "be saved; set compress_prompt_at, or leave kv_compression out.",
            "compress_prompt_at",
        )


def _save(
    host: EngineCore,
    *,
    tokens: list[int],
    path: Path,
    salt: str | None,
    compression: CompressionConfig | None,
    compress_prompt_at: int | None,
) -> SessionInfo:
    return host.llm.save_session(
        {"prompt_token_ids": tokens, "cache_salt": salt, "compress_prompt_at": compress_prompt_at},
        path,
        compression=compression,
    )


def _restore(host: EngineCore, *, path: Path, salt: str | None) -> SessionInfo:
    return host.llm.load_session(path, cache_salt=salt)


async def _run_in_engine(service: Service, work: Any, filename: str) -> SessionInfo:
    """Run work in the engine between two steps. Raises: ApiError."""
    try:
        info: SessionInfo = await service.engine.call(work)
    except FileNotFoundError as error:
        raise ApiError(404, f"there is no saved session {filename!r}.", "filename") from error
    except InvalidArgumentError as error:
        text = str(error).replace(str(service.config.slot_save_path), "")
        if error.field in engine_fields():
            raise ApiError(400, text, engine_fields()[error.field]) from error
        raise ApiError(409 if error.field not in (None, "filename") else 400, text, "filename") from error
    except OSError as error:
        raise ApiError(503, f"the session could not be moved: {error.strerror}.", "filename") from error
    return info
