"""vLLM's real scheduler, KV cache manager and block pool with a worker made of plain lists (list_worker.py):
fit to be fuzzed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from list_worker import ListWorker, StateWorker, WindowWorker
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvreclaim.integrations.vllm.settings.groups import full_group, is_recurrent

STOP = 7


def make_scheduler(
    model: Path,
    num_blocks: int,
    options: Mapping[str, Any] | None,
    *,
    asynchronous: bool = False,
    v2: bool = False,
    window: int | None = None,
    states: bool = False,
    **engine: Any,
) -> Any:
    """The scheduler that an engine with these options would make; None: vLLM's own.

    num_blocks: of the pool, the null block included
    window:     of sliding windows, tokens, in a cache group before that of full attention and one behind it
    states:     recurrent ones in these groups instead
    engine:     of EngineArgs; lengths in tokens
    """
    given = {"block_size": 32, "max_num_seqs": 16, "max_num_batched_tokens": 256, **engine}
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        additional_config={"kv_compression": dict(options)} if options is not None else {},
        **given,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    if options is not None:
        from kvreclaim.integrations.vllm.settings import family

        family.module("front").take_over(config)
    config.cache_config.num_gpu_blocks = num_blocks
    size = given["block_size"]
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups, other = [KVCacheGroupSpec(["layer"], spec)], None
    if window is not None:
        other = SlidingWindowSpec(
            block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window
        )
    elif states:
        config.cache_config.block_size = size
        caching = config.cache_config.enable_prefix_caching
        config.cache_config.mamba_cache_mode = "align" if caching else "none"
        other = MambaSpec(
            block_size=size if caching else config.model_config.max_model_len,
            shapes=((2 * size,),),
            dtypes=(torch.float32,),
            mamba_cache_mode=config.cache_config.mamba_cache_mode,
        )
    if other is not None:
        groups = [KVCacheGroupSpec(["before"], other), *groups, KVCacheGroupSpec(["behind"], other)]
        size = math.lcm(size, other.block_size)
    register_all_kvcache_specs(config)
    made = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        block_size=size,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )
    made.use_v2_model_runner = v2
    return made


class World:
    """A scheduler and its worker, step by step, with the whole structure checked after each."""

    def __init__(self, scheduler: Any, seed: int = 0) -> None:
        init_none_hash(sha256)
        self.scheduler = scheduler
        self.manager = scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.managers = self.manager.coordinator.single_type_managers
        group = full_group(self.manager.kv_cache_config)
        self.tables = self.managers[group]
        self.size = self.tables.block_size
        other = next((each for each in self.managers if each is not self.tables), None)
        is_state = other is not None and is_recurrent(other.kv_cache_spec)
        worker = ListWorker if other is None else StateWorker if is_state else WindowWorker
        self.worker = worker(self.pool.num_gpu_blocks, self.size, Random(seed), group)
        if is_state:
            self.worker.reach = other.block_size
        self.depth = 2 if isinstance(scheduler, AsyncScheduler) else 1
        self.flying: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.requests: dict[str, Request] = {}
        self.steps = self.peak = self.hits = self.num_passes = self.num_begun = 0
        self.outputs: dict[str, Any] = {}

    def add(
        self, name: str, prompt: Sequence[int], max_tokens: int, wanted: Any = None, **more: Any
    ) -> Request:
        """Queue a request; wanted: its extra_args["kv_compression"]."""
        extra = None if wanted is None else {"kv_compression": wanted}
        stop = more.pop("stop", False)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=list(range(2, 8)) if stop else None,
            extra_args=extra,
        )
        hasher = get_request_block_hasher(self.size, sha256)
        request = Request(name, list(prompt), params, None, block_hasher=hasher, **more)
        self.worker.tokens[name] = list(prompt)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Schedule one step and execute it; take in outputs as many steps later as are in flight."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.check_message(getattr(output, "kvreclaim", None))
            started = [data.req_id for data in output.scheduled_new_reqs]
            for name in (*started, *output.scheduled_cached_reqs.resumed_req_ids):
                # A reset drops what was in flight: vLLM sends the worker its tokens again.
                self.worker.tokens[name] = list(self.requests[name].all_token_ids)
                self.worker.chains.pop(name, None)
            news = getattr(output, "kvreclaim_snapshots", None)
            self.num_begun += len(news.begun) if news else 0
            self.hits += sum(data.num_computed_tokens for data in output.scheduled_new_reqs)
            self.flying.append((output, self.worker.execute(output)))
            self.steps += output.total_num_scheduled_tokens > 0
            self.peak = max(self.peak, self.used)
        if len(self.flying) >= self.depth or not self.scheduler.has_unfinished_requests():
            while self.flying:
                self.take_in(*self.flying.popleft())
                if len(self.flying) < self.depth:
                    break
        self.check_pool()

    def take_in(self, output: Any, result: ModelRunnerOutput) -> None:
        for batch in self.scheduler.update_from_output(output, result).values():
            self.outputs.update({item.request_id: item for item in batch.outputs})

    def drain(self, limit: int = 5000) -> None:
        """Run until nothing is left. Raises: AssertionError if that takes more than limit steps."""
        for _ in range(limit):
            if not (self.scheduler.has_requests() or self.flying):
                return
            self.step()
        raise AssertionError(f"{self.scheduler.get_request_counts()} requests left after {limit} steps")

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())

    @property
    def used(self) -> int:
        """Blocks held by requests."""
        return int(self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks())

    def held(self, name: str) -> list[int]:
        return [block.block_id for block in self.tables.req_to_blocks.get(name, ()) if not block.is_null]

    def check_message(self, message: Any) -> None:
        """Assert that each block to be written belongs to one request and is in no index."""
        assert message is None or message.passes, "a message without a pass"
        seen: set[int] = set()
        for done in message.passes if message else ():
            self.num_passes += 1
            assert self.held(done.seq_id)[: len(done.target_ids)] == list(done.target_ids)
            assert (done.num_tokens - done.keep) % self.size == 0
            for block_id in done.target_ids:
                block = self.pool.blocks[block_id]
                assert block.ref_cnt == 1
                assert block.block_hash is None
                assert block_id not in seen
                seen.add(block_id)

    def check_pool(self) -> None:
        """Assert that every block is free, or counted by exactly the tables that hold it."""
        counts = [0] * self.pool.num_gpu_blocks
        for blocks in (table for each in self.managers for table in each.req_to_blocks.values()):
            held = [block.block_id for block in blocks if not block.is_null]
            assert len(set(held)) == len(held)
            for block_id in held:
                counts[block_id] += 1
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        assert len(free) == self.pool.get_num_free_blocks()
        for block in self.pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == counts[block.block_id]
                assert (block.block_id in free) == (block.ref_cnt == 0)
                assert (
                    block.block_hash is None
                    or block.block_hash.startswith(b"kvreclaim snapshot")
                    or self.worker.is_exact(block.block_id)
                )

    def check_empty(self) -> None:
        """Assert that nothing is left of any request."""
        assert not any(each.req_to_blocks for each in self.managers)
        assert not self.scheduler.requests
        assert self.used == 0
        if (ledger := getattr(self.scheduler, "reclaim", None)) is not None:
            assert not ledger.records
        assert self.scheduler.reset_prefix_cache()
