"""The page that the plugin for vLLM serves, over a pool that a test sets, in place of a scheduler."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import httpx2
import numpy as np

from kvreclaim.integrations.vllm.live.server import PageServer
from kvreclaim.integrations.vllm.settings.page_address import PageAddress
from kvreclaim.page.frames import Compaction, Snapshot
from kvreclaim.page.sharing import Sharing
from kvreclaim.page.view import FREE, IN_USE, PoolView, RequestView
from kvreclaim.schedule import Pass
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

LIMIT_S = 300.0
NAMES = ("prompt_tokens", "generation_tokens", "tokens_evicted", "compactions", "blocks_freed")
NAMES += ("prefix_query_tokens", "prefix_hit_tokens")


class ToyPool:
    """tables: blocks by request, numbered from 1 as vLLM's. idle: whether no request is there."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.tables: dict[str, list[int]] = {}
        self.idle = True
        self.num_looks = 0
        self.totals = dict.fromkeys(NAMES, 0)

    def look(self, compactions: list[Compaction]) -> Snapshot:
        self.num_looks += 1
        state = np.full(self.num_blocks, FREE, np.uint8)
        owner = np.full(self.num_blocks, -1, np.int32)
        for index, blocks in enumerate(self.tables.values()):
            places = np.array(blocks, np.int64) - 1
            state[places], owner[places] = IN_USE, index
        requests = tuple(
            RequestView(name, 1, 32 * len(blocks) + 64, 32 * len(blocks), len(blocks), 64, 2)
            for name, blocks in self.tables.items()
        )
        return Snapshot(
            at_s=float(self.num_looks),
            view=PoolView(state, owner, requests),
            sharing=Sharing((), 0),
            num_running=len(requests),
            num_waiting=0,
            totals=dict(self.totals),
            tiers=None,
            compactions=compactions,
            first=1,
        )


@contextmanager
def serving(pool: ToyPool, address: PageAddress | None = None) -> Iterator[PageServer]:
    settings = {
        "models": ["toy"],
        "num_blocks": pool.num_blocks,
        "block_size": 32,
        "max_model_len": 4096,
        "policies": [],
        "default_policy": "streaming_llm",
    }
    with closing(PageServer(address or PageAddress(0), settings, pool.look, lambda: pool.idle)) as server:
        yield server


def shrunk(request_id: str, source: Sequence[int], target: Sequence[int], *, evicted: int) -> Pass[str]:
    """A pass as the ledger plans it, over blocks of 32 tokens."""
    num_tokens = 32 * len(source)
    return Pass(
        seq_id=request_id,
        eviction_method=EvictionMethod.COMPACT,
        source_ids=tuple(source),
        target_ids=tuple(target),
        num_tokens=num_tokens,
        keep=num_tokens - evicted,
        logical_len=num_tokens,
        prompt_slots=0,
        first=True,
        blocks_freed=len(source) - len(target),
    )


@contextmanager
def feed_of(server: PageServer) -> Iterator[Iterator[tuple[str, Any]]]:
    """(name, data) of the events; a frame's cells are unpacked."""
    with httpx2.stream("GET", f"{server.url}page/feed", timeout=LIMIT_S) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        yield events_in(response)


def events_in(response: httpx2.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            data = json.loads(line[6:])
            yield name, unpacked(data) if name == "frame" else data


def unpacked(frame: dict[str, Any]) -> dict[str, Any]:
    """The frame with state and owner of each cell."""
    raw, num = zlib.decompress(base64.b64decode(frame["cells"])), frame["shown"]
    assert frame["group"] == 1
    return frame | {
        "owner": np.frombuffer(raw[: 2 * num], "<u2"),
        "state": np.frombuffer(raw[2 * num :], np.uint8),
    }


def frame_with(events: Iterator[tuple[str, Any]], **fields: Any) -> dict[str, Any]:
    """The next frame of which these fields hold."""
    return next(
        data
        for name, data in events
        if name == "frame" and all(data[field] == value for field, value in fields.items())
    )
