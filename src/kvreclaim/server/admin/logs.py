"""Structured logs: one line per record, without users' text."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO

from pydantic_core import to_json

from kvreclaim.checks import check_choice

if TYPE_CHECKING:
    from kvreclaim.engine.api.exports import Tokenizer
    from kvreclaim.server.shared.access import Access

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "json", "text")
QUIET_ROUTES = ("/health", "/metrics", "/load", "/version", "/kv_offload/status")
"""Paths that machines poll; logged at DEBUG."""

REQUEST_ID = re.compile(r"req-[0-9a-f]{32}")
TEXTLESS = re.compile(
    r"(torch|transformers\.models|kvreclaim\.(ops|memory|schedule|compression|model"
    r"|engine\.(step\.(validation|lengths|engine)|request\.footprints|execute|attend|compact|signals"
    r"|sampling\.(sampler|processors|truncation))))\b"
    r"(?!.*token)"
)
"""Modules that handle token ids and tensors but no text; their exception messages may be logged."""

WITHHELD = "(message withheld: it may quote a prompt; --log-prompts shows it)"

UNSEEN = [
    *range(0x20),
    *range(0x7F, 0xA0),
    0x61C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
]
"""Control characters, line ends and direction marks, which could forge a log line."""
SEEN = {code: f"\\u{code:04x}" for code in UNSEEN}

access_logger = logging.getLogger("kvreclaim.access")


class StructuredFormatter(logging.Formatter):
    """Format a record as JSON or as text with key=value pairs; `extra={"fields": {...}}` adds fields.

    A line about a request has its `request_id`.
    """

    def __init__(self, style: Literal["json", "text"], *, log_prompts: bool) -> None:
        super().__init__()
        self.json = style == "json"
        self.log_prompts = log_prompts

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if "request_id" not in fields and (found := REQUEST_ID.search(message)):
            fields["request_id"] = found[0]
        trace = ""
        if record.exc_info and record.exc_info[1] is not None:
            trace = "".join(describe(record.exc_info[1], log_prompts=self.log_prompts))
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        if self.json:
            head = {"time": at, "level": record.levelname.lower(), "logger": record.name, "message": message}
            tail = {"exception": trace} if trace else {}
            return to_json({**head, **fields, **tail}, fallback=str).decode().translate(SEEN)
        pairs = "".join(f" {name}={to_json(value, fallback=str).decode()}" for name, value in fields.items())
        lines = [f"{at} {record.levelname} {record.name}: {message}{pairs}", *trace.rstrip().split("\n")]
        return "\n".join(line.translate(SEEN) for line in lines if line)


def describe(error: BaseException, *, log_prompts: bool) -> Iterator[str]:
    """Format a traceback; exception messages are included only if they cannot quote a user's text."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from describe(cause, log_prompts=log_prompts)
        yield "\n... and then:\n"
    yield from traceback.format_tb(error.__traceback__)
    is_loggable = log_prompts or TEXTLESS.match(_raised_in(error))
    yield f"{type(error).__module__}.{type(error).__qualname__}: {error if is_loggable else WITHHELD}\n"
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield "\n... one of them:\n"
            yield from describe(part, log_prompts=log_prompts)


def _raised_in(error: BaseException) -> str:
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""


def configure_logging(
    log_format: str, level: str, *, log_prompts: bool, stream: TextIO | None = None
) -> None:
    """Send every log line of the process to stderr. Other packages log from WARNING on, so that their debug
    output does not write users' text.

    Raises: InvalidArgumentError.
    """
    check_choice("log_format", log_format, FORMATS)
    check_choice("log_level", level, LEVELS)
    stream = stream if stream is not None else sys.stderr
    if log_format == "auto":
        log_format = "text" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        StructuredFormatter("json" if log_format == "json" else "text", log_prompts=log_prompts)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("kvreclaim").setLevel(level.upper())
    own = logging.getLogger("transformers")  # has a handler of its own
    own.handlers.clear()
    own.propagate = True


def log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handler for loop.set_exception_handler: asyncio's own logs the exception's text."""
    logging.getLogger("asyncio").error("%s", context["message"], exc_info=context.get("exception"))


class AccessLog:
    """Writes one line per HTTP request.

    log_prompts: include prompts and answers
    """

    def __init__(self, tokenizer: Tokenizer | None, *, log_prompts: bool) -> None:
        self.tokenizer = tokenizer
        self.log_prompts = log_prompts

    def __call__(self, access: Access) -> None:
        level = logging.DEBUG if access.route in QUIET_ROUTES and access.status < 400 else logging.INFO
        if not access_logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "request_id": access.request_id,
            "method": access.method,
            "path": access.path,
            "status": access.status,
            "duration_s": round(access.elapsed_s, 6),
        }
        optional = {"tenant": access.tenant, "model": access.model, "user": access.user}
        fields |= {name: value for name, value in optional.items() if value is not None}
        if access.streams:
            fields |= _figures(access)
            if self.log_prompts:
                fields |= self._texts(access)
        access_logger.log(
            level, "%s %s %d", access.method, access.path, access.status, extra={"fields": fields}
        )

    def _texts(self, access: Access) -> dict[str, list[str]]:
        tokenizer = self.tokenizer
        given = [stream.new.prompt_token_ids for stream in access.streams]
        return {
            "prompts": [str(tokenizer.decode(ids) if tokenizer is not None else ids) for ids in given],
            "answers": [text for stream in access.streams for text in stream.texts],
        }


def _figures(access: Access) -> dict[str, Any]:
    times = {"queue_s": access.first("queue_s"), "ttft_s": access.first("ttft_s")}
    return {
        "prompt_tokens": access.total("num_prompt_tokens"),
        "cached_tokens": access.total("num_cached_tokens"),
        "completion_tokens": access.total("num_generated_tokens"),
        "tokens_evicted": access.total("tokens_evicted"),
        "blocks_freed": access.total("blocks_freed"),
        "preemptions": access.total("preemptions"),
        "finish_reasons": access.finish_reasons,
        **{name: round(value, 6) for name, value in times.items() if value is not None},
    }
