"""What vLLM 0.32's OffloadingConnector sees of compressed requests: their blocks as long as they are exact.

Until its first pass a request is like any other: its full blocks are stored and loaded. At the first pass the
connector sees it preempted and resumed with a table of null blocks, which are never stored. So

    stores under way     end before the pass writes or frees what they read (handle_preemptions)
    later blocks         do not exist for the connector, not at the end of the request either
    blocks written by passes, and new ones of compressed requests
                         show as targets of block copies: stores of others that still read them end first
    a real preemption    makes the request whole again; what was stored of it is a hit
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData

from kvreclaim.integrations.vllm import signatures
from kvreclaim.integrations.vllm.ledger import Ledger

NULL_BLOCK = 0


class ConnectorHooks:
    """Go before two methods of the scheduler's connector, on this one object.

    Raises: UnsupportedVllmError.
    """

    def __init__(self, connector: Any, ledger: Ledger) -> None:
        signatures.check_connector()
        self.reclaim = ledger
        self.find, self.build = connector.get_num_new_matched_tokens, connector.build_connector_meta
        connector.get_num_new_matched_tokens = self.get_num_new_matched_tokens
        connector.build_connector_meta = self.build_connector_meta

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A hit must leave room for one step's tokens, as in KVCacheManager.get_computed_blocks."""
        found, later = self.find(request, num_computed_tokens)
        most = self.reclaim.most_hit(request)
        if not found or most is None or num_computed_tokens + found <= most:
            return found, later
        part = max(0, most - num_computed_tokens)
        return part, later and part > 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.build(shown(scheduler_output, self.reclaim))


def shown(output: Any, ledger: Ledger) -> Any:
    """The SchedulerOutput as the connector may see it; the output itself if no request is compressed."""
    cached, passes = output.scheduled_cached_reqs, ledger.current_passes()
    new_blocks = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
    hidden = set(filter(ledger.is_compressed, new_blocks))
    if not hidden and not passes:
        return output
    written = [block for done in passes for block in done.target_ids]
    written += [block for name in hidden for group in new_blocks[name] or () for block in group]
    copies = [KVCacheBlockCopy(block, block) for block in written]
    seen = {name: blocks for name, blocks in new_blocks.items() if name not in hidden}
    begun = {done.seq_id: ([NULL_BLOCK] * len(done.source_ids),) for done in passes if done.first}
    scheduled = {name: num for name, num in output.num_scheduled_tokens.items() if name not in hidden}
    rows = replace(
        CachedRequestData.make_empty(),  # the connector reads these three columns alone
        req_ids=[*seen, *begun],
        new_block_ids=[*seen.values(), *begun.values()],
        resumed_req_ids={*cached.resumed_req_ids, *begun},
    )
    return replace(
        output,
        scheduled_cached_reqs=rows,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids={*(output.preempted_req_ids or ()), *begun},
        kv_cache_block_copies=[*(output.kv_cache_block_copies or ()), *copies],
    )
