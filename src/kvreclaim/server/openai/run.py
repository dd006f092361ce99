"""A request's streams of updates, to the end at once or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from kvreclaim.engine.face.stream import RequestStream, Update
from kvreclaim.server.service import check_update

Updates = AsyncGenerator[tuple[int, Update], None]


async def collect(streams: Sequence[RequestStream]) -> list[Update]:
    """Everything of each stream, once all have ended. Raises: ApiError 500 if one failed."""
    answers = []
    for stream in streams:
        answer = await stream.rest()
        check_update(stream, answer)
        answers.append(answer)
    return answers


def updates(streams: Sequence[RequestStream]) -> Updates:
    """Updates as they come, each with the place of its stream. Raises: ApiError 500 if a request failed."""
    return _one(streams[0]) if len(streams) == 1 else _merged(streams)


async def _one(stream: RequestStream) -> Updates:
    async for update in stream:
        check_update(stream, update)
        yield 0, update


async def _merged(streams: Sequence[RequestStream]) -> Updates:
    waiting = {asyncio.ensure_future(stream.next()): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place, update = waiting.pop(task), task.result()
                check_update(streams[place], update)
                if not update.finished:
                    waiting[asyncio.ensure_future(streams[place].next())] = place
                yield place, update
    finally:
        for task in waiting:
            task.cancel()
