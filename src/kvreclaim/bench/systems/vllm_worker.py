"""vLLM's side of the benchmarks: a script for the interpreter of vLLM's own environment.

One JSON object per line: commands on standard input, answers on a private copy of standard output (what
vLLM prints goes to standard error). The engine core runs in this process, so that nothing decodes between
two commands. Imports nothing of kvreclaim.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch

Answer = dict[str, Any]
Prompts = list[list[int]]


class Worker:
    """Holds one vLLM engine and the requests of the point that is open."""

    def load(
        self,
        *,
        model: str,
        dtype: str,
        max_len: int,
        batch: int,
        num_blocks: int,
        block_size: int,
        eager: bool,
        chunk: int,
    ) -> Answer:
        """Start the engine with exactly num_blocks blocks. Answers versions, threads and the pool."""
        import transformers
        import vllm
        from vllm import LLM

        self.llm: Any = LLM(
            model,
            dtype=dtype,
            enforce_eager=eager,
            max_model_len=max_len,
            max_num_seqs=batch,
            max_num_batched_tokens=chunk,
            num_gpu_blocks_override=num_blocks,
            block_size=block_size,
            disable_log_stats=True,
        )
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.noise: torch.Tensor | None = None
        return {
            "vllm": vllm.__version__,
            "vllm_torch": torch.__version__,
            "vllm_transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "vocab_size": self.runner.model_config.get_vocab_size(),
            "num_blocks": self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            "block_size": block_size,
            "eager": eager,
        }

    def open(self, *, prompts: Prompts, max_tokens: int, synthetic: bool) -> Answer:
        """Send the prompts and step until each of them has its first token."""
        started = time.perf_counter()
        self.names = [f"{time.time_ns()}-{i}" for i in range(len(prompts))]
        self.count = dict.fromkeys(self.names, 0)
        for name, prompt in zip(self.names, prompts, strict=True):
            self._add(name, prompt, max_tokens)
        if synthetic:
            with self.synthetic_prefill():
                self._fill()
        else:
            self._fill()
        return {"fill_s": time.perf_counter() - started}

    def _fill(self) -> None:
        while not all(self.count.values()):
            if not self.engine.has_unfinished_requests():
                raise RuntimeError("requests ended while they were being filled")
            self._step()

    def run(self, *, steps: int) -> Answer:
        """Time some steps. Answers seconds, and tokens that came."""
        before = sum(self.count.values())
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        elapsed_s = time.perf_counter() - started
        return {"elapsed_s": elapsed_s, "tokens": sum(self.count.values()) - before}

    def _step(self) -> None:
        for output in self.engine.step():
            self.count[output.request_id] = len(output.outputs[0].token_ids)

    def close(self) -> Answer:
        """Abort what is left of the point and forget every cached prefix."""
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.engine.reset_prefix_cache()
        return {}

    def generate(self, *, prompts: Prompts, max_tokens: int) -> Answer:
        """Greedy tokens of each prompt."""
        outputs: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            self._add(str(i), prompt, max_tokens)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
        return {"tokens": [outputs[i] for i in range(len(prompts))]}

    def serve(self, *, prompts: Prompts, max_tokens: int) -> Answer:
        """All requests to their ends in the pool: how many run at once, preemptions, blocks, seconds."""
        pool = self.scheduler.kv_cache_manager.block_pool
        self.count = {}
        running: list[int] = []
        waiting: list[int] = []
        peak, preemptions = 0, _PreemptionCount(self.scheduler)
        for i, prompt in enumerate(prompts):
            self._add(f"serve-{time.time_ns()}-{i}", prompt, max_tokens)
        started = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self._step()
            running.append(len(self.scheduler.running))
            waiting.append(len(self.scheduler.waiting))
            peak = max(peak, pool.num_gpu_blocks - pool.get_num_free_blocks())
        elapsed_s = time.perf_counter() - started
        self.engine.reset_prefix_cache()
        return {
            "elapsed_s": elapsed_s,
            "running": running,
            "waiting": waiting,
            "peak_blocks": peak,
            "preemptions": preemptions.stop(),
        }

    def _add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    @contextmanager
    def synthetic_prefill(self) -> Iterator[None]:
        """While it lasts, steps that hold more than decodes store random keys and values, nothing else."""
        from vllm.forward_context import get_forward_context

        runner = self.runner
        compute = runner._model_forward
        context = runner.vllm_config.compilation_config.static_forward_context
        hidden_size = runner.model_config.get_hidden_size()

        def forward(input_ids: Any = None, **kwargs: Any) -> Any:
            metadata = get_forward_context().attn_metadata
            if not metadata or next(iter(metadata.values())).max_query_len <= 1:
                return compute(input_ids=input_ids, **kwargs)
            for name, meta in metadata.items():
                layer = context[name]
                noise = self._noise(input_ids.shape[0], layer)
                layer.impl.do_kv_cache_update(layer, noise, noise, layer.kv_cache, meta.slot_mapping)
            return torch.rand(input_ids.shape[0], hidden_size).to(runner.dtype)

        runner._model_forward = forward
        try:
            yield
        finally:
            del runner._model_forward

    def _noise(self, tokens: int, layer: Any) -> torch.Tensor:
        if self.noise is None or self.noise.shape[0] < tokens:
            shape = (tokens, layer.num_kv_heads, layer.head_size)
            self.noise = torch.randn(shape).to(self.runner.dtype)
        return self.noise[:tokens]


class _PreemptionCount:
    """Counts the scheduler's preemptions from now on."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.count, self.inner = scheduler, 0, scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self.inner(*args, **kwargs)

        scheduler._preempt_request = counted

    def stop(self) -> int:
        del self.scheduler._preempt_request
        return self.count


def random_prompts(batch: int, context: int, vocab_size: int, seed: int) -> Prompts:
    """The prompts that kvreclaim's side makes of the same numbers."""
    low = 256 if vocab_size > 1024 else 2
    rng = random.Random(seed)
    prompts = [rng.choices(range(low, vocab_size - 1), k=context) for _ in range(batch)]
    first = rng.sample(range(low, vocab_size - 1), batch)
    for prompt, token in zip(prompts, first, strict=True):
        prompt[0] = token
    return prompts


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("command")
        try:
            if "draw" in command:
                command["prompts"] = random_prompts(**command.pop("draw"))
            answer = getattr(worker, name)(**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
