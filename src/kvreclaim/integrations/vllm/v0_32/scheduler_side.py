"""The scheduler of vLLM 0.32: passes before it schedules, admission by expected blocks, figures.

Synchronous and asynchronous scheduling share it. Nothing is patched: the schedulers are subclasses that the
configuration names, and the KV cache manager of one instance changes its class.
"""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import asdict, replace
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.live.step_observer import StepObserver
from kvreclaim.integrations.vllm.refusals import signatures
from kvreclaim.integrations.vllm.refusals.loaded import refuse_groups, refuse_scheduler
from kvreclaim.integrations.vllm.scheduler.ledger import Ledger
from kvreclaim.integrations.vllm.settings import family
from kvreclaim.integrations.vllm.settings.groups import (
    IN_FLIGHT,
    full_group,
    is_recurrent,
    state_blocks,
    window_blocks,
)
from kvreclaim.integrations.vllm.settings.max_loss import budget_text
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.settings.speculation import drafts_of
from kvreclaim.integrations.vllm.v0_32 import pool_snapshot
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import CompactionPlan, Shrunk, TableState

FIGURES = "kvreclaim"
RUNNING = RequestStatus.RUNNING


class VllmPool:
    """vLLM's block pool and the tables of its KV cache group with full attention, as a ledger.PlacedPool.

    A table keeps its length: the place of a block given back holds the null block, behind the blocks that are
    left, so that "blocks missing = ceil(tokens / block size) - length of the table" stays right for vLLM.

    num_spare: see PlacedPool.covering
    """

    num_spare = 0

    def __init__(self, manager: KVCacheManager) -> None:
        managers = manager.coordinator.single_type_managers
        self.tables = managers[full_group(manager.kv_cache_config)]
        self.others = [each for each in managers if each is not self.tables]
        self.windows = [each for each in self.others if not is_recurrent(each.kv_cache_spec)]
        self.states = [each for each in self.others if each not in self.windows]
        self.pool = manager.block_pool

    def covering(self, num_spare: int) -> VllmPool:
        other = copy(self)
        other.num_spare = num_spare
        return other

    @property
    def num_blocks(self) -> int:
        return int(self.pool.num_gpu_blocks) - 1

    @property
    def num_free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def places(self, request_id: str) -> int:
        return len(self.tables.req_to_blocks.get(request_id, ()))

    def others_held(self, request_id: str) -> int:
        tables = (each.req_to_blocks.get(request_id, ()) for each in self.others)
        return sum(not block.is_null for table in tables for block in table)

    def others_most(self, num_tokens: int) -> int:
        return sum(min(blocks_for(num_tokens, each.block_size), _most(each)) for each in self.others)

    def others_settled(self, num_tokens: int) -> int:
        return sum(min(blocks_for(num_tokens, each.block_size), _settled(each)) for each in self.others)

    def table_state(self, request_id: str) -> TableState:
        blocks, _ = self._split(request_id)
        return TableState(
            [block.block_id for block in blocks],
            [block.ref_cnt for block in blocks],
            [block.block_hash is not None for block in blocks],
        )

    def shrink(self, plan: CompactionPlan[str]) -> Shrunk:
        request_id = plan.seq_id
        blocks, spare = self._split(request_id)
        own = {block.block_id: block for block in blocks}
        free_before = self.num_free
        if plan.strip:
            self.pool.evict_blocks(set(plan.strip))
        fresh = iter(self.pool.get_new_blocks(plan.targets.count(None)))
        targets = [next(fresh) if block is None else own[block] for block in plan.targets]
        target_ids = tuple(block.block_id for block in targets)
        if self.states:  # workers zero what requests take in a step, after its passes, which fill these
            self.tables.new_block_ids = [n for n in self.tables.new_block_ids if n not in target_ids]
        table = targets + spare
        holes = [self.pool.null_block] * (self.places(request_id) - len(table))
        self.tables.req_to_blocks[request_id] = table + holes
        for each in (self.tables, *self.others):
            each.num_cached_block[request_id] = sys.maxsize  # all is in the prefix index that ever will be
        kept = set(target_ids)
        self.pool.free_blocks([block for key, block in reversed(own.items()) if key not in kept])
        return Shrunk(tuple(block.block_id for block in table), self.num_free - free_before)

    def _split(self, request_id: str) -> tuple[list[Any], list[Any]]:
        """The blocks that hold its tokens, and the spare ones."""
        blocks = [block for block in self.tables.req_to_blocks[request_id] if not block.is_null]
        end = len(blocks) - self.num_spare
        return blocks[:end], blocks[end:]


def _most(manager: Any) -> int:
    """Blocks of a request at most in a group that is not compressed."""
    if is_recurrent(spec := manager.kv_cache_spec):
        return state_blocks(
            spec.mamba_cache_mode == "align", spec.num_prefill_checkpoint_blocks, in_flight=IN_FLIGHT
        )
    return int(manager.max_admission_blocks_per_request)


def _settled(manager: Any) -> int:
    """Return the most blocks of a request in such a group after its prompt."""
    if is_recurrent(spec := manager.kv_cache_spec):
        return state_blocks(spec.mamba_cache_mode == "align", num_checkpoints=0, in_flight=1)
    return window_blocks(manager.sliding_window, manager.block_size, IN_FLIGHT)


class ReclaimKVCacheManager(KVCacheManager):
    """Admits compressed requests by the blocks that they come to hold, not by their whole length.

    reclaim:   the scheduler's ledger
    scheduler: a new request leaves room for its running requests
    """

    reclaim: Ledger
    scheduler: Any

    def get_computed_blocks(self, request: Any, *args: Any, **kwargs: Any) -> tuple[Any, int, int]:
        """A hit must leave room for one step's tokens, or a prompt longer than the pool would never start."""
        blocks, num_tokens, boundary = super().get_computed_blocks(request, *args, **kwargs)
        most = self.reclaim.most_hit(request)
        if most is None or num_tokens <= most:
            return blocks, num_tokens, boundary
        if len(blocks.blocks) == 1:
            num_blocks = most // self.reclaim.block_size
            return self.create_kv_cache_blocks((list(blocks.blocks[0][:num_blocks]),)), most, 0
        # Other groups have other blocks in front of a shorter prefix, if they still have them.
        found, num_tokens, _ = self.coordinator.find_longest_cache_hit(request.block_hashes, most)
        return self.create_kv_cache_blocks(found), num_tokens, 0

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """The asynchronous scheduler hashes blocks once it knows their tokens."""
        if not self.reclaim.is_compressed(request.request_id):
            super().cache_blocks(request, num_computed_tokens)

    def holes(self, request: Any) -> int:
        """Return the places of evicted tokens in the table that a waiting request would begin with."""
        return 0

    def allocate_slots(
        self, request: Any, num_new_tokens: int, num_new_computed_tokens: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        args = num_new_tokens, num_new_computed_tokens, *args
        start = request.num_computed_tokens + num_new_computed_tokens
        step = range(start, start + num_new_tokens)
        if request.status is RUNNING:
            if not self.reclaim.may_go_on(request):
                return None
            self._keep_for_others(request, step)
            if self.reclaim.is_compressed(request.request_id):
                kwargs["delay_cache_blocks"] = True  # states find a way past num_cached_block
            return super().allocate_slots(request, *args, **kwargs)
        caps = self.reclaim.caps(request)
        tables = self.reclaim.pool.tables  # type: ignore[attr-defined]
        tables.max_admission_blocks_per_request = None if caps is None else caps.own + self.holes(request)
        room = self.reclaim.room(request, self.scheduler.running)
        if room is None:
            return None
        kwargs["reserved_blocks"] = max(kwargs.get("reserved_blocks", 0), room)
        self._keep_for_others(request, step)
        return super().allocate_slots(request, *args, **kwargs)

    def _keep_for_others(self, request: Any, step: range) -> None:
        """Mark the blocks of windows and states that others need in vLLM: see Ledger.hit_boundary."""
        pool: VllmPool = self.reclaim.pool  # type: ignore[assignment]
        if pool.states and self.reclaim.ends_exact(request, step):
            request.shared_prefix_boundary = step.stop
        if pool.windows:
            size = pool.tables.block_size
            tail = max(blocks_for(each.sliding_window - 1, size) for each in pool.windows) * size
            request.shared_prefix_boundary = self.reclaim.hit_boundary(
                request, step, tail, request.shared_prefix_boundary
            )


class SchedulerHooks:
    """Mixin of a scheduler, before vLLM's Scheduler or AsyncScheduler in the bases.

    reclaim:  the ledger of passes; set once vLLM's own parts are made
    observer: counts what the page and the metrics show
    """

    reclaim: Ledger
    observer: StepObserver

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Raises: UnsupportedVllmError, InvalidArgumentError, UnsupportedModelError."""
        signatures.check_core()
        refuse_groups(kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)  # type: ignore[call-arg]
        refuse_scheduler(self)
        options = Options.of_config(vllm_config)
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        pool = VllmPool(manager)
        max_chunk = self.max_num_scheduled_tokens  # type: ignore[attr-defined]
        self.reclaim = Ledger(options, pool, pool.tables.block_size, max_chunk, drafts_of(vllm_config))
        manager.__class__ = ReclaimKVCacheManager
        manager.reclaim, manager.scheduler = self.reclaim, self
        if options.snapshots:
            family.module("snapshots").adopt_snapshots(self)
        connector = self.connector  # type: ignore[attr-defined]
        if connector is not None:
            from kvreclaim.integrations.vllm.v0_32.connector_side import adopt_connector

            adopt_connector(connector, self.reclaim)
        self._reported = replace(self.reclaim.totals)
        self._check_pool()
        self.observer = StepObserver(self.reclaim)
        self.observer.page = pool_snapshot.open_page(self, options, vllm_config)

    def _check_pool(self) -> None:
        """Check that the pool holds the longest request at its peak. Raises: InvalidArgumentError."""
        ledger = self.reclaim
        longest = self.max_model_len  # type: ignore[attr-defined]
        needed = ledger.most_blocks(longest)
        if needed > ledger.pool.num_blocks:
            settings, have = ledger.options.settings, ledger.pool.num_blocks
            raise InvalidArgumentError(
                f"the KV cache has {have} blocks of {ledger.block_size} tokens, and a request "
                f"of max_model_len {longest} holds up to {needed}: {budget_text(settings)}, interval "
                f"{settings.interval} and one step of {ledger.max_chunk} tokens; lower "
                "--max-num-batched-tokens or --max-model-len, or give the cache more memory."
            )

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.observer.begin_step()
        passes = self.reclaim.compress(self.running)  # type: ignore[attr-defined]
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        self.observer.passed(passes, self.running)  # type: ignore[attr-defined]
        message = self.reclaim.message(passes)
        if message is not None:
            output.kvreclaim = message
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.reclaim.totals.seconds += getattr(model_runner_output, FIGURES, 0.0)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self.observer.end_step()
        return outputs

    def shutdown(self) -> None:
        self.observer.close()
        super().shutdown()  # type: ignore[misc]

    def _free_request_blocks(self, request: Any) -> None:
        self.observer.freeing(request)
        self.reclaim.forget(request.request_id)
        super()._free_request_blocks(request)  # type: ignore[misc]

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> tuple[Any, Any]:
        figures = self.reclaim.figures(request)
        kv_params, ec_params = super()._free_request(request, delay_free_blocks)  # type: ignore[misc]
        self.reclaim.close(request.request_id)
        self.observer.ended(request.request_id)
        if figures is not None:
            kv_params = {**(kv_params or {}), FIGURES: figures}
        return kv_params, ec_params

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Add the figures since the last statistics to a KV connector's; our logger removes them.

        Differences, not sums: with several front ends each of them gets some of the statistics.
        """
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            found = stats.prefix_cache_stats
            self.observer.looked_up(
                found.queries + found.preempted_queries, found.hits + found.preempted_hits
            )
        if stats is not None and self.reclaim.totals != self._reported:
            totals, before = asdict(self.reclaim.totals), asdict(self._reported)
            figures = {name: totals[name] - before[name] for name in totals}
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), FIGURES: figures}
            self._reported = replace(self.reclaim.totals)
        return stats
