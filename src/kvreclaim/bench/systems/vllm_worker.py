"""vLLM's side of the benchmarks: a worker of worker_loop.py for the interpreter of vLLM's own environment.

The engine core runs in this process, so that nothing decodes between two commands. Imports nothing of
kvreclaim.
"""

from __future__ import annotations

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

    def platform(self) -> Answer:
        """Return the kind of device that vLLM runs on, and its name."""
        from vllm.platforms import current_platform

        return {"device": current_platform.device_type, "card": current_platform.get_device_name()}

    def load(self, **options: Any) -> Answer:
        """Start the engine with vLLM's own options. Answers versions, threads, the pool, whether our plugin
        was loaded, and the scheduler."""
        from vllm import LLM

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
            "block_size": self.runner.cache_config.block_size,
            "graphs": self.runner.compilation_config.cudagraph_mode.name,
            "runner": f"{type(self.runner).__module__}.{type(self.runner).__name__}",
            "attention": sorted({each.get_name() for each in self._backends()}),
        }

    def _backends(self) -> Iterator[Any]:
        for groups in self.runner.attn_groups:
            yield from (group.backend for group in groups)

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

    def _step(self) -> None:
        """Run one step and count the tokens of each request."""
        for output in self.engine.step():
            self.count[output.request_id] = len(output.outputs[0].token_ids)

    def close(self) -> Answer:
        """Abort the point's remaining requests and reset the prefix cache."""
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.engine.reset_prefix_cache()
        return {}

    def generate(self, *, prompts: Prompts, max_tokens: int, extra: Answer | None = None) -> Answer:
        """Greedy tokens of each prompt, the seconds for all, and what the plugin reports of each.

        extra: extra_args of the requests
        """
        outputs: dict[int, Any] = {}
        started = time.perf_counter()
        for i, prompt in enumerate(prompts):
            self._add(str(i), prompt, max_tokens, extra)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                outputs[int(output.request_id)] = output
        elapsed_s = time.perf_counter() - started
        found = [outputs[i] for i in range(len(prompts))]
        reports = [(output.kv_transfer_params or {}).get("kvreclaim") for output in found]
        tokens = [list(output.outputs[0].token_ids) for output in found]
        return {"tokens": tokens, "elapsed_s": elapsed_s, "reports": reports}

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

    def _add(self, name: str, prompt: list[int], max_tokens: int, extra: Answer | None = None) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
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
