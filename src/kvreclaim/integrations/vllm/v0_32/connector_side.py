"""Compressed requests and vLLM 0.32's KV connectors, which get their blocks as long as they are exact.

Until its first pass a request is like any other: its full blocks are stored and loaded. At the first pass the
connector sees it preempted and resumed with a table of null blocks, which are never stored. So

    stores under way     end before the pass writes or frees what they read (handle_preemptions), or keep it:
                         SimpleCPUOffloadConnector counts as one more that reads the block
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

from kvreclaim.integrations.vllm.refusals import signatures
from kvreclaim.integrations.vllm.scheduler.ledger import Ledger

NULL_BLOCK = 0


def adopt_connector(connector: Any, ledger: Ledger) -> None:
    """Go before methods of the scheduler's connector or, of a MultiConnector, of each that it has.

    Raises: UnsupportedVllmError.
    """
    name = type(connector).__name__
    signatures.check_connector(name)
    if name in HOOKS:
        HOOKS[name](connector, ledger)
        return
    for each in connector.sub_connectors:
        adopt_connector(each, ledger)


class ConnectorHooks:
    """Go before methods of one connector: as they stand, of OffloadingConnector."""

    def __init__(self, connector: Any, ledger: Ledger) -> None:
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


class CachedBlockHooks(ConnectorHooks):
    """SimpleCPUOffloadConnector stores a block in the step after it was computed, and missed blocks at the
    end of a request. Instead of null blocks it takes those of the same tokens from the prefix cache."""

    def __init__(self, connector: Any, ledger: Ledger) -> None:
        super().__init__(connector, ledger)
        self.finish = connector.request_finished_all_groups
        connector.request_finished_all_groups = self.request_finished_all_groups

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Tokens computed just before a first pass are stored in the step of the pass."""
        output, num_tokens = shown(scheduler_output, self.reclaim), scheduler_output.num_scheduled_tokens
        begun = {done.seq_id for done in self.reclaim.current_passes() if done.first} & num_tokens.keys()
        due = output.num_scheduled_tokens | {name: num_tokens[name] for name in begun}
        return self.build(replace(output, num_scheduled_tokens=due))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        if self.reclaim.is_compressed(request.request_id):
            block_ids = tuple([NULL_BLOCK] * len(blocks) for blocks in block_ids)
        return self.finish(request, block_ids)


class WholePromptHooks(ConnectorHooks):
    """ExampleConnector keeps a prompt's full blocks, but for one that ends it, in files named by all of them,
    in the step that first schedules it. So a prompt that takes several steps is not stored, and a hit is what
    the files hold or none: it can neither be shortened nor continue a preempted request."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found, later = self.find(request, num_computed_tokens)
        most, stored = self.reclaim.most_hit(request), self._stored(request.num_prompt_tokens)
        fits = found > 0 and num_computed_tokens + found == stored and (most is None or stored <= most)
        return (found, later) if fits and not request.num_preemptions else (0, False)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        num_scheduled = scheduler_output.num_scheduled_tokens
        whole = [
            new
            for new in scheduler_output.scheduled_new_reqs
            if 0
            < self._stored(len(new.prompt_token_ids or ()))
            <= new.num_computed_tokens + num_scheduled[new.req_id]
        ]
        return self.build(replace(shown(scheduler_output, self.reclaim), scheduled_new_reqs=whole))

    def _stored(self, num_prompt_tokens: int) -> int:
        size = self.reclaim.block_size
        return max(0, num_prompt_tokens - 1) // size * size


HOOKS: dict[str, type[ConnectorHooks]] = {
    "OffloadingConnector": ConnectorHooks,
    "SimpleCPUOffloadConnector": CachedBlockHooks,
    "ExampleConnector": WholePromptHooks,
}


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
