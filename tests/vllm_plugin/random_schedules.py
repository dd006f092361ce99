"""Random histories of vLLM's own scheduler, block pool and prefix cache; all they decide, as data.

>>> history(tiny_model, seed=3) == history(tiny_model, seed=3)  # nothing in it depends on time or addresses
True
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulation import make_scheduler
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

BLOCK = 32
END = 511
Step = dict[str, Any]


def scheduler_of(model: Path, *, asynchronous: bool = False) -> Any:
    """vLLM's scheduler, of the class that its configuration names, over a pool that runs out of blocks."""
    init_none_hash(sha256)
    engine = {"max_model_len": 512, "max_num_batched_tokens": 96, "max_num_seqs": 6}
    return make_scheduler(model, 30, None, asynchronous=asynchronous, **engine)


def make_request(name: str, prompt: list[int], max_tokens: int) -> Any:
    """Ends at END; its blocks are hashed as in an engine."""
    params = SamplingParams(max_tokens=max_tokens)
    params.update_from_generation_config({}, END)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, prompt, params, None, arrival_time=0.0, block_hasher=hasher)


def history(model: Path, seed: int, *, asynchronous: bool = False, steps: int = 300) -> list[Step]:
    """Decisions of the scheduler in each step of random requests with shared prefixes, aborts and resets."""
    rng = random.Random(seed)
    scheduler = scheduler_of(model, asynchronous=asynchronous)
    prefixes = [[rng.randrange(END) for _ in range(100)] for _ in range(3)]
    trace: list[Step] = []
    for number in range(steps):
        if rng.random() < 0.25 and number < steps - 100:
            shared = rng.choice(prefixes)[: rng.randrange(100)]
            prompt = shared + [rng.randrange(END) for _ in range(rng.randrange(1, 60))]
            scheduler.add_request(make_request(f"r{number}", prompt, rng.randrange(1, 120)))
        if rng.random() < 0.02 and scheduler.requests:
            _abort(scheduler, rng.choice(sorted(scheduler.requests)))
        if rng.random() < 0.01:
            scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        trace.append(_step(scheduler, rng))
    return trace


def _abort(scheduler: Any, name: str) -> None:
    scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


def _step(scheduler: Any, rng: random.Random) -> Step:
    """Schedule, draw random tokens, take them; one tenth of the tokens end their request."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    drawn = {}
    for name in names:
        request = scheduler.requests[name]
        is_prefill = request.num_computed_tokens < request.num_tokens
        token = END if rng.random() < 0.02 else rng.randrange(END)
        drawn[name] = [] if is_prefill else [token]
    done = ModelRunnerOutput(
        names, {name: i for i, name in enumerate(names)}, [drawn[name] for name in names]
    )
    answers = scheduler.update_from_output(output, done)
    stats = scheduler.make_stats()
    return {
        **_decided(output),
        "answers": [_answer(one) for of in answers.values() for one in of.outputs],
        "running": [request.request_id for request in scheduler.running],
        "usage": None
        if stats is None
        else (stats.kv_cache_usage, stats.num_waiting_reqs, stats.kv_connector_stats),
        **_pool(scheduler),
    }


def _decided(output: Any) -> Step:
    """All of a SchedulerOutput that depends on blocks; every attribute's name."""
    cached = output.scheduled_cached_reqs
    return {
        "scheduled": dict(output.num_scheduled_tokens),
        "new": [(r.req_id, r.block_ids, r.num_computed_tokens) for r in output.scheduled_new_reqs],
        "cached": [cached.req_ids, sorted(cached.resumed_req_ids), cached.new_block_ids],
        "computed": list(cached.num_computed_tokens),
        "finished": sorted(output.finished_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "names": sorted(vars(output)),
    }


def _answer(output: Any) -> tuple[Any, ...]:
    return output.request_id, list(output.new_token_ids), output.finish_reason, output.kv_transfer_params


def _pool(scheduler: Any) -> Step:
    """Every block's place, count and hash, and every request's table."""
    manager = scheduler.kv_cache_manager
    tables = manager.coordinator.single_type_managers[0].req_to_blocks
    return {
        "free": [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()],
        "blocks": [(block.ref_cnt, block.block_hash) for block in manager.block_pool.blocks],
        "tables": {name: [block.block_id for block in blocks] for name, blocks in sorted(tables.items())},
    }


def pool_history(seed: int, *, steps: int = 2000) -> Iterator[tuple[Any, ...]]:
    """The pool alone after each of many random calls: order of free blocks, counts, hashes."""
    init_none_hash(sha256)
    rng = random.Random(seed)
    pool = BlockPool(50, enable_caching=True, hash_block_size=BLOCK)
    held: list[tuple[Any, list[Any]]] = []
    for number in range(steps):
        what = rng.choice(["take", "take", "share", "free", "free", "forget", "reset"])
        if what == "take" and (count := rng.randrange(1, 8)) <= pool.get_num_free_blocks():
            tokens = [rng.randrange(3) for _ in range(count * BLOCK)]
            blocks, request = pool.get_new_blocks(count), make_request(f"p{number}", tokens, 1)
            pool.cache_full_blocks(request, blocks, 0, rng.randrange(count + 1), BLOCK, 0)
            held.append((request, blocks))
        elif what == "share" and held:
            request, _ = rng.choice(held)
            found = [pool.get_cached_block(digest, [0]) for digest in request.block_hashes]
            hits = [block for hit in found if hit for block in hit]
            pool.touch(hits)
            held.append((request, hits))
        elif what == "free" and held:
            pool.free_blocks(reversed(held.pop(rng.randrange(len(held)))[1]))
        elif what == "forget":
            pool.evict_blocks({rng.randrange(1, 50) for _ in range(3)})
        elif what == "reset":
            pool.reset_prefix_cache()
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        yield what, tuple(free), tuple((block.ref_cnt, block.block_hash) for block in pool.blocks)
