"""Responses that are made while their client does other things: read, followed and cancelled by id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvreclaim.server.responses.answer import ResponseAnswer


class BackgroundResponse:
    """A response with its events so far."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self.answer = answer
        self.is_done = False
        self._events = answer.events()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Queue it. Raises: ApiError if the request is refused."""
        await anext(self._events)
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            async for _ in self._events:
                self._wake()
        except asyncio.CancelledError:
            await self._events.aclose()
            await self.answer.cancel()
        finally:
            self.is_done = True
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Events with a sequence number above `after`, to the last one."""
        first = after + 1
        while True:
            news, sent, is_done = self._news, self.answer.sent, self.is_done
            if first < len(sent):
                some = sent[first:]
                first += len(some)
                yield b"".join(some)
            elif is_done:
                return
            else:
                await news.wait()

    async def cancel(self) -> None:
        """End it, unless it has ended, with what it has so far."""
        if self._task is not None and not self.is_done:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.answer.sent))


class BackgroundResponses:
    """The running ones, and those that ended last, up to `most_bytes` of events."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._by_id: dict[tuple[str | None, str], BackgroundResponse] = {}

    async def start(self, answer: ResponseAnswer) -> BackgroundResponse:
        """Raises: ApiError if the request is refused."""
        made = BackgroundResponse(answer)
        await made.start()
        self._forget()
        self._by_id[answer.prompt.tenant, answer.response["id"]] = made
        return made

    def get(self, tenant: str | None, response_id: str) -> BackgroundResponse | None:
        return self._by_id.get((tenant, response_id))

    async def delete(self, tenant: str | None, response_id: str) -> bool:
        """Cancel and forget it. Returns: whether there was one."""
        found = self._by_id.pop((tenant, response_id), None)
        if found is not None:
            await found.cancel()
        return found is not None

    def _forget(self) -> None:
        ended = [key for key, each in self._by_id.items() if each.is_done]
        left = sum(self._by_id[key].num_bytes for key in ended)
        for key in ended:
            if left <= self._most_bytes:
                return
            left -= self._by_id.pop(key).num_bytes
