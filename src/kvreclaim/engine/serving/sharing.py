"""Shared blocks: the running sequences' blocks as a radix tree, for a page that draws it."""

from __future__ import annotations

from kvreclaim.engine.step.engine import Engine
from kvreclaim.page.sharing import Sharing, share_tree


def who_shares(engine: Engine) -> Sharing:
    """Return the running sequences that share blocks. Call between two steps, in the engine's thread."""
    running = engine.scheduler.running
    owners: dict[str, int] = {}
    rows = [seq.block_row(engine.memory.table(seq.seq_id)) for seq in running]
    return share_tree(rows, [owners.setdefault(seq.request_id, len(owners)) for seq in running])
