"""Lines of the server's log, as its formatter writes them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import web
from running import MODEL, Running
from steering import until

from kvreclaim.server.admin.logs import StructuredFormatter


class Log:
    """Everything that is logged, as the server's formatter writes it, from DEBUG on and by every logger."""

    def __init__(self, *, log_prompts: bool) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(StructuredFormatter("json", log_prompts=log_prompts))

    @classmethod
    @contextmanager
    def attached(cls, *, log_prompts: bool = False) -> Iterator[Log]:
        """Write until the block ends, with every logger at DEBUG."""
        log = cls(log_prompts=log_prompts)
        loggers = [logging.getLogger(), logging.getLogger("kvreclaim")]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.DEBUG)
        loggers[0].addHandler(log.handler)
        try:
            yield log
        finally:
            loggers[0].removeHandler(log.handler)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    def access(self, request_id: str) -> dict[str, Any]:
        """The access line of a request; it is written when the answer has been sent."""

        def mine() -> list[dict[str, Any]]:
            return [
                line
                for line in self.lines
                if line["logger"] == "kvreclaim.access" and line["request_id"] == request_id
            ]

        until(mine)
        assert len(mine()) == 1
        return mine()[0]


def post(server: Running, path: str, body: Any, **options: Any) -> httpx2.Response:
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return web.post(server.base_url + path, content=content, headers=headers, **options)


def complete(server: Running, **fields: Any) -> httpx2.Response:
    return post(server, "/v1/completions", {"model": MODEL, "prompt": "GO wind", "max_tokens": 4, **fields})
