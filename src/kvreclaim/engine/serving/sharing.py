"""Shared blocks: the running sequences' blocks as a radix tree, for a page that draws it."""

from __future__ import annotations

from kvreclaim.engine.attend.block_rows import block_row
from kvreclaim.engine.step.engine import Engine
from kvreclaim.page.sharing import Sharing, share_tree


def who_shares(engine: Engine) -> Sharing:
    """Which running sequences share blocks. Call it between two steps, in the engine's thread."""
    owners: dict[str, int] = {}
    rows = [
        (block_row(seq, engine.memory), owners.setdefault(seq.request.request_id, len(owners)))
        for seq in engine.scheduler.running
    ]
    return share_tree([row for row, _ in rows], [owner for _, owner in rows])
