"""vLLM engines for tests: small, in this process, greedy, with log-probabilities, and a view of their inside.

>>> engine = Engine(directory, compression={"policy": "streaming_llm", "budget": 128, "interval": 64})
>>> with engine.traced() as trace:  # what each pass kept, by worker
...     [answer] = engine.generate([prompt], 100)
>>> logprobs_with_drops(directory, prompt, answer.tokens, passes_of(trace, answer.request_id))

An Engine is expensive (10 to 20 s): make one for many tests, and close() it before the next one.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KEY = "kv_compression"
Traces = list[list[tuple[str, int, Tensor]]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request.

    tokens:        generated ids
    logprobs:      [len(tokens)] float32, of those tokens
    cached_tokens: of the prompt, found in the prefix cache
    figures:       what the plugin reports of the request ({}: nothing)
    """

    request_id: str
    tokens: list[int]
    logprobs: Tensor
    cached_tokens: int
    figures: dict[str, int]


@dataclass(slots=True)
class Watch:
    """Figures after each step of Engine.run, oldest first; preemptions is their sum.

    running, waiting: requests
    used:             blocks of the pool that are not free (the null block not counted)
    """

    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    preemptions: int = 0

    @property
    def steps(self) -> int:
        return len(self.running)


class Engine:
    """One vLLM engine.

    Args:
        model:        directory (models.make_tiny_model)
        compression:  "kv_compression" of --additional-config; None: none, vLLM as it is
        centred_keys: of --additional-config
        num_blocks:   of the pool, vLLM's null block included
        block_size:   tokens, a multiple of 32
        chunk:        most tokens of a step: longer prompts are computed in chunks
        batch:        most requests that run at once
        max_len:      most tokens of a request
        asynchronous: the asynchronous scheduler, which vLLM switches off on CPUs
        more:         further arguments of vllm.LLM, such as tensor_parallel_size or kv_cache_dtype;
                      enforce_eager and dtype are True and "bfloat16" unless given here
    """

    def __init__(
        self,
        model: Path,
        *,
        compression: Mapping[str, Any] | None = None,
        centred_keys: bool | str = False,
        num_blocks: int = 130,
        block_size: int = 32,
        chunk: int = 256,
        batch: int = 16,
        max_len: int = 2048,
        asynchronous: bool = False,
        **more: Any,
    ) -> None:
        from vllm import LLM

        settings: dict[str, Any] = {"enforce_eager": True, "dtype": "bfloat16", **more}
        if compression is not None or centred_keys:
            own = {} if compression is None else {KEY: dict(compression)}
            settings["additional_config"] = own | ({"centred_keys": centred_keys} if centred_keys else {})
        with forced_async() if asynchronous else nullcontext():
            self.llm: Any = LLM(
                str(model),
                num_gpu_blocks_override=num_blocks,
                block_size=block_size,
                max_num_batched_tokens=chunk,
                max_num_seqs=batch,
                max_model_len=max_len,
                **settings,
            )
        self.engine: Any = self.llm.llm_engine
        self.config: Any = self.engine.vllm_config
        self._names = (f"r{number}" for number in itertools.count())
        self._finished: dict[str, Any] = {}

    @property
    def core(self) -> Any:
        """vLLM's EngineCore, where it is in this process; so with all that follow."""
        return self.engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """`.reclaim` of it is the plugin's ledger, where "kv_compression" is set."""
        return self.core.scheduler

    @property
    def pool(self) -> Any:
        """vLLM's BlockPool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def worker(self) -> Any:
        """The worker of rank 0, with one worker."""
        return self.core.model_executor.driver_worker.worker

    @property
    def runner(self) -> Any:
        """`.reclaim` of it is the plugin's applier, where "kv_compression" is set."""
        return self.worker.model_runner

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        name: str | None = None,
        settings: Any = None,
        stop: Sequence[int] = (),
        **sampling: Any,
    ) -> str:
        """Hand in one request without a step; greedy, not stopped by the end token.

        Args:
            name:     its id, which no other has had; None makes one up
            settings: extra_args["kv_compression"]: "off", "on", a dict, a JSON string; None: left out
            stop:     token ids that end it, themselves the last of its output
            sampling: more of vllm.SamplingParams

        Returns: its id. Raises: what vLLM raises for it.
        """
        name = next(self._names) if name is None else name
        params = greedy(max_tokens, settings, stop_token_ids=list(stop), **sampling)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return name

    def step(self) -> None:
        """Run one engine step; requests that end in it are kept for answer."""
        for output in self.engine.step():
            if output.finished:
                self._finished[output.request_id] = output

    def run(self, *, after_step: Callable[[], None] | None = None) -> Watch:
        """Step until nothing is left to do. In-process engines only.

        Args:
            after_step: called after each step, for instance to hand in or abort requests, or to check

        Returns: what was seen on the way.
        """
        watch = Watch()
        with self.counted_preemptions() as preempted:
            while self.engine.has_unfinished_requests():
                self.step()
                watch.running.append(len(self.scheduler.running))
                watch.waiting.append(len(self.scheduler.waiting))
                watch.used.append(self.used_blocks())
                if after_step is not None:
                    after_step()
        watch.preemptions = len(preempted)
        return watch

    def finish(self) -> None:
        """Step until nothing is left to do, wherever the core is."""
        while self.engine.has_unfinished_requests():
            self.step()

    def answer(self, name: str) -> Answer:
        """Take the answer of a finished request; once."""
        output = self._finished.pop(name)
        [completion] = output.outputs
        tokens = list(completion.token_ids)
        values = [at[token].logprob for token, at in zip(tokens, completion.logprobs, strict=True)]
        figures = (output.kv_transfer_params or {}).get("kvreclaim", {})
        return Answer(name, tokens, torch.tensor(values), output.num_cached_tokens or 0, dict(figures))

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, settings: Any = None
    ) -> list[Answer]:
        """Run all prompts at once to their ends; settings as in add(), for each of them."""
        names = [self.add(prompt, max_tokens, settings=settings) for prompt in prompts]
        self.finish()
        return [self.answer(name) for name in names]

    def chat(self, messages: list[dict[str, Any]], max_tokens: int, *, settings: Any = None) -> Answer:
        """Run one conversation to its end, by way of vLLM's own chat; settings as in add()."""
        [output] = self.llm.chat(messages, greedy(max_tokens, settings), use_tqdm=False)
        self._finished[output.request_id] = output
        return self.answer(output.request_id)

    def abort(self, names: Sequence[str]) -> None:
        """Abort requests by the ids that add() returned."""
        self.engine.abort_request(list(names))

    @contextmanager
    def traced(self) -> Iterator[Traces]:
        """Record the passes made meanwhile; the list is filled when the block ends: for oracle.passes_of.

        With the core in a process of its own, VLLM_ALLOW_INSECURE_SERIALIZATION=1 has to be set.
        """
        traces: Traces = []
        self.llm.collective_rpc("kvreclaim_trace", args=(True,))
        try:
            yield traces
        finally:
            traces += [pickle.loads(trace) for trace in self.llm.collective_rpc(_take_trace)]
            self.llm.collective_rpc("kvreclaim_trace", args=(False,))

    @contextmanager
    def counted_preemptions(self) -> Iterator[list[str]]:
        """The engine's ids of the requests preempted meanwhile, once each time. In-process engines only."""
        scheduler, names = self.scheduler, []
        inner = scheduler._preempt_request

        def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
            names.append(request.request_id)
            return inner(request, *args, **kwargs)

        scheduler._preempt_request = preempt
        try:
            yield names
        finally:
            del scheduler._preempt_request

    def used_blocks(self) -> int:
        """Blocks that a request holds: neither free nor the null block."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    def is_empty(self) -> bool:
        """Whether every block is free once the prefix cache is emptied: call it with no request left."""
        return bool(self.engine.reset_prefix_cache()) and self.used_blocks() == 0

    def close(self) -> None:
        """Give back its memory and its processes, so that another engine can be made in this process."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        del self.llm, self.engine
        cleanup_dist_env_and_memory()


class Engines:
    """One engine at a time.

    settings: of the compression that each is started with, beside its policy
    """

    def __init__(self, model: Path, **settings: Any) -> None:
        self.model, self.settings = model, settings
        self.policy: str | None = None
        self.engine: Engine | None = None

    def having(self, policy: str) -> Engine:
        """An engine that was started with this policy."""
        if policy != self.policy:
            self.close()
            self.engine = Engine(self.model, compression={"policy": policy, **self.settings})
            self.policy = policy
        assert self.engine is not None
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = self.policy = None


def greedy(max_tokens: int, settings: Any = None, **sampling: Any) -> Any:
    """vllm.SamplingParams that the end token does not stop; settings as in Engine.add."""
    from vllm import SamplingParams

    extra_args = None if settings is None else {KEY: settings}
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=0, ignore_eos=True, extra_args=extra_args, **sampling
    )


def _take_trace(worker: Any) -> bytes:
    """Pickled, because tensors within tuples do not survive vLLM's own messages between processes."""
    return pickle.dumps(worker.kvreclaim_take_trace())


@contextmanager
def forced_async() -> Iterator[None]:
    """Engines made meanwhile schedule asynchronously, which the CPU platform otherwise forbids, whenever a
    configuration is made."""
    from vllm.platforms.cpu import CpuPlatform

    inner = vars(CpuPlatform)["check_and_update_config"]

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        inner.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = inner
