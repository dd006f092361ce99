"""vLLM's side of the benchmarks: a worker of worker_loop.py for the interpreter of vLLM's own environment.

The engine core runs in this process, so that nothing decodes between two commands. Imports nothing of
kvreclaim.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch

Answer = dict[str, Any]
Prompts = list[list[int]]


class Worker:
    """Holds one vLLM engine and the requests of the open point."""

    def load(self, forced: bool = False, **options: Any) -> Answer:
        """Start the engine with vLLM's own options. Answers versions, threads, the pool, whether our plugin
        was loaded, and the scheduler. forced: requests can be forced to generate given tokens, see score."""
        from vllm import LLM

        if forced:
            options["logits_processors"] = [_forced_processor()]
        self.llm: Any = LLM(disable_log_stats=True, **options)
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.noise: torch.Tensor | None = None
        return self._describe()

    def _describe(self) -> Answer:
        import transformers
        import vllm

        return {
            "vllm": vllm.__version__,
            "vllm_torch": torch.__version__,
            "vllm_transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "vocab_size": self.runner.model_config.get_vocab_size(),
            "num_blocks": self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            "plugin": "kvreclaim.integrations.vllm.entry.plugin" in sys.modules,
            "scheduler": type(self.scheduler).__name__,
        }

    def open(self, *, prompts: Prompts, max_tokens: int, synthetic: bool) -> Answer:
        """Send the prompts and step until each of them has its first token."""
        started = time.perf_counter()
        self.names = [f"{time.time_ns()}-{i}" for i in range(len(prompts))]
        self.count = dict.fromkeys(self.names, 0)
        for name, prompt in zip(self.names, prompts, strict=True):
            self._add(name, prompt, max_tokens)
        with self.synthetic_prefill() if synthetic else nullcontext():
            self._fill()
        return {"fill_s": time.perf_counter() - started}

    def _fill(self) -> None:
        while not all(self.count.values()):
            if not self.engine.has_unfinished_requests():
                raise RuntimeError("requests ended while they were being filled")
            self._step()

    def run(self, *, steps: int) -> Answer:
        """Time some steps. Answers seconds and tokens."""
        before = sum(self.count.values())
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        elapsed_s = time.perf_counter() - started
        return {"elapsed_s": elapsed_s, "tokens": sum(self.count.values()) - before}

    def _step(self) -> list[Any]:
        """Run one step. Returns: outputs of requests that got a token, with their counts."""
        outputs: list[Any] = self.engine.step()
        for output in outputs:
            self.count[output.request_id] = len(output.outputs[0].token_ids)
        return outputs

    def close(self) -> Answer:
        """Abort the point's remaining requests and reset the prefix cache."""
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
        """Serve all requests to their ends in the pool. Answers, step by step, seconds since the start,
        running and waiting requests, blocks in use; overall: seconds of wall and processor, preemptions, a
        digest of the tokens, and figures of compression and drafts."""
        log = _ServeLog(self.scheduler)
        self.count = {}
        tokens: dict[str, Any] = {}
        names = [f"serve-{time.time_ns()}-{i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self._add(name, prompt, max_tokens)
        started, cpu_started = time.perf_counter(), time.process_time()
        while self.engine.has_unfinished_requests():
            for output in self._step():
                tokens[output.request_id] = output.outputs[0].token_ids
                log.answers += 1
            log.note(time.perf_counter() - started)
        elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        self.engine.reset_prefix_cache()
        drawn = json.dumps([list(tokens[name]) for name in names])
        digest = hashlib.sha256(drawn.encode()).hexdigest()[:16]
        return {"elapsed_s": elapsed_s, "cpu_s": cpu_s, "digest": digest, **log.stop()}

    def score(self, *, prompts: Prompts, continuations: Prompts, settings: Any) -> Answer:
        """Score given continuations: the most likely ids, log-probabilities of the given tokens, and the most
        blocks of a request at its end. settings: of compression."""
        from vllm import SamplingParams

        tables = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        held: dict[str, int] = {}
        outputs: dict[str, Any] = {}
        for i, (prompt, tokens) in enumerate(zip(prompts, continuations, strict=True)):
            extra = {"forced": tokens, "kv_compression": settings}
            params = SamplingParams(
                temperature=0.0, max_tokens=len(tokens), ignore_eos=True, logprobs=1, extra_args=extra
            )
            self.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            for name, blocks in tables.items():
                held[name] = sum(not block.is_null for block in blocks)
            for output in self.engine.step():
                if output.finished:
                    outputs[output.request_id] = output.outputs[0]
        self.engine.reset_prefix_cache()
        results = [outputs[str(i)] for i in range(len(prompts))]
        best = [[_best_of(at) for at in output.logprobs] for output in results]
        given = [
            [at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)]
            for output, tokens in zip(results, continuations, strict=True)
        ]
        return {"predicted": best, "logprobs": given, "blocks": max(held.values())}

    def prompt_logprobs(self, *, prompts: Prompts) -> Answer:
        """Log-probabilities of all tokens of the prompts but their first, one prompt after the other."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(given, params, use_tqdm=False)
        return {
            "logprobs": [
                at[token].logprob
                for output in outputs
                for at, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            ]
        }

    def _add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    @contextmanager
    def synthetic_prefill(self) -> Iterator[None]:
        """Replace steps with prefill by storing random keys and values during the block."""
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

        with patch.object(runner, "_model_forward", forward):
            yield

    def _noise(self, tokens: int, layer: Any) -> torch.Tensor:
        if self.noise is None or self.noise.shape[0] < tokens:
            shape = (tokens, layer.num_kv_heads, layer.head_size)
            self.noise = torch.randn(shape).to(self.runner.dtype)
        return self.noise[:tokens]


def _best_of(logprobs: Any) -> int:
    """The likeliest token of a position."""
    return next(token for token, each in logprobs.items() if each.rank == 1)


def _forced_processor() -> type:
    """A logits processor that forces the tokens of extra_args["forced"]."""
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forced(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            tokens = (params.extra_args or {}).get("forced")
            if tokens is None:
                return None

            def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
                logits.fill_(-torch.inf)
                logits[tokens[len(output_ids)]] = 0.0
                return logits

            return force

    return Forced


class _ServeLog:
    """Records the scheduler's and the pool's work in each step."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        self.preemptions = self.after_pass = self.decoding = 0
        self.answers = self.drafted = self.accepted = 0
        self.steps: dict[str, list[float]] = {"at_s": [], "running": [], "waiting": [], "blocks": []}
        self.before = self._totals()
        self.preempt, self.schedule = scheduler._preempt_request, scheduler.schedule
        scheduler._preempt_request, scheduler.schedule = self._counted, self._watched
        self.verify = scheduler.make_spec_decoding_stats
        scheduler.make_spec_decoding_stats = self._verified

    def _totals(self) -> Answer:
        reclaim = getattr(self.scheduler, "reclaim", None)
        return {} if reclaim is None else dataclasses.asdict(reclaim.totals)

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.preemptions += 1
        return self.preempt(*args, **kwargs)

    def _verified(self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **more: Any) -> Any:
        """Count drafts of one request that a step has verified."""
        self.drafted += num_draft_tokens
        self.accepted += num_accepted_tokens
        return self.verify(stats, num_draft_tokens, num_accepted_tokens, **more)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        """Return the scheduler's own result; record the most blocks of a request after its compression."""
        output = self.schedule(*args, **kwargs)
        message = getattr(output, "kvreclaim", None)
        for done in message.passes if message else ():
            self.after_pass = max(self.after_pass, len(done.target_ids))
        return output

    def note(self, at_s: float) -> None:
        """Record the end of a step. A request with more than its first token was scheduled, and so compressed
        if due, after its prompt was complete."""
        self.steps["at_s"].append(at_s)
        self.steps["running"].append(len(self.scheduler.running))
        self.steps["waiting"].append(len(self.scheduler.waiting))
        self.steps["blocks"].append(self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks())
        for request in self.scheduler.running:
            if request.num_output_tokens > 1:
                held = sum(not block.is_null for block in self.tables[request.request_id])
                self.decoding = max(self.decoding, held)

    def stop(self) -> Answer:
        """Return the record. decoding, after_pass: most blocks of one request while it decodes, and after a
        pass; answers: steps that gave a request tokens, of all requests."""
        del self.scheduler._preempt_request, self.scheduler.schedule, self.scheduler.make_spec_decoding_stats
        done = {name: value - self.before[name] for name, value in self._totals().items()}
        left = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()
        figures = {"preemptions": self.preemptions, "after_pass": self.after_pass, "decoding": self.decoding}
        figures |= {"answers": self.answers, "drafted": self.drafted, "accepted": self.accepted}
        return {**self.steps, **figures, "left": left, "reclaim": done}
