"""kvreclaim itself: its engine is stepped, and only decode steps are timed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from kvreclaim.bench.systems.base import (
    BLOCK_SIZE,
    CHUNK,
    Point,
    Session,
    SkipPoint,
    Slice,
    System,
    SystemSetup,
)
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.request import Request
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model.attention import Narrowed
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.sampling_params import SamplingParams

PROMPT_STEPS = 1 << 20


class KvreclaimSystem(System):
    """One policy with its own pool, large enough for the largest of `points`."""

    def __init__(
        self,
        name: str,
        setup: SystemSetup,
        points: list[Point],
        *,
        config: CompressionConfig | None = None,
        kernels: str = "auto",
        kv_cache_dtype: str = "auto",
        activations: str = "auto",
    ) -> None:
        self.name = name
        self.setup = setup
        self.config = config
        self.multiple = 1 if config is None else config.interval
        self._ids = itertools.count()
        self._slots = {point: self._slots_needed(point) for point in points}
        self.llm = LLM(
            setup.model,
            dtype=setup.dtype,
            compression=config,
            block_size=BLOCK_SIZE,
            num_blocks=max(blocks_for(slots, BLOCK_SIZE) for slots in self._slots.values()),
            max_num_seqs=max(point.batch for point in points),
            max_num_batched_tokens=CHUNK,
            max_model_len=max(point.max_len for point in points),
            kernels=kernels,
            kv_cache_dtype=kv_cache_dtype,
            quantized_activations=activations,
        )
        self.compressor = None if config is None else self.llm.compressor(config)

    def _slots_needed(self, point: Point) -> int:
        """Slots of all sequences at their largest, with a spare block for each."""
        most = point.max_len
        if self.config is not None:
            most = min(most, 2 * self.config.budget + max(self.config.interval, CHUNK))
        return point.batch * (most + 2 * BLOCK_SIZE)

    def new_bytes(self, point: Point) -> int:
        engine = self.llm.engine
        return engine.cache.bytes_per_block * blocks_for(self._slots_needed(point), engine.config.block_size)

    def facts(self) -> dict[str, object]:
        budget = (
            {} if self.config is None else {"budget": self.config.budget, "interval": self.config.interval}
        )
        engine = self.llm.engine
        stored = {"kv_cache_dtype": engine.kv_format.name, "block_size": engine.config.block_size}
        return {"kernels": engine.kernels, **stored, **budget}

    def open(self, point: Point) -> OurSession:
        return OurSession(self, point)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts, params, self.config)
        if wrong := [out.error for out in outputs if out.error is not None]:
            raise RuntimeError(f"{self.name}: a request failed: {wrong[0]}")
        return [out.outputs[0].token_ids for out in outputs]

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        """Queue one greedy request under this system's policy."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        name = f"bench-{next(self._ids)}"
        return self.llm.engine.add_request(name, prompt, params, self.compressor)


class OurSession(Session):
    """Requests that stay in the engine, and decode only in `run`."""

    def __init__(self, system: KvreclaimSystem, point: Point) -> None:
        self.engine = system.llm.engine
        self.name = system.name
        prompts = point.prompts(system.llm.loaded.vocab_size)
        started = perf_counter()
        self.requests = [system.add(prompt, point.max_len - point.context) for prompt in prompts]
        with synthetic_prefill(system.llm) if point.fill == "synthetic" else nullcontext():
            self._fill()
        self.fill_s = perf_counter() - started

    def _fill(self) -> None:
        for _ in range(PROMPT_STEPS):
            if all(request.sequences[0].num_generated for request in self.requests):
                return
            self.engine.step()
            self._check()
        raise RuntimeError(f"{self.name}: the prompts were not computed in {PROMPT_STEPS} steps")

    def run(self, steps: int) -> Slice:
        before = self.engine.totals.generation_tokens
        started = perf_counter()
        for _ in range(steps):
            self.engine.step()
        elapsed_s = perf_counter() - started
        self._check()
        tokens = self.engine.totals.generation_tokens - before
        if tokens != steps * len(self.requests):
            raise SkipPoint(f"{tokens} tokens came in {steps} steps of {len(self.requests)} sequences")
        return Slice(steps, tokens, elapsed_s)

    def _check(self) -> None:
        if wrong := [request.error for request in self.requests if request.error is not None]:
            raise SkipPoint(f"a request failed: {wrong[0]}")

    def close(self) -> None:
        for request in self.requests:
            if not request.finished:
                self.engine.abort(request.request_id)


@contextmanager
def synthetic_prefill(llm: LLM) -> Iterator[None]:
    """Replace the forward pass by storing random keys and values during the block.

    Scheduling, block tables and compression run as usual; logits are random; CUDA graphs are not used.
    """
    facts, vocab_size, model = llm.loaded.facts, llm.loaded.vocab_size, llm.loaded.model
    keys, values = _noise(facts, facts.layers[0].head_dim), _noise(facts, facts.layers[0].v_head_dim)
    logits = torch.rand(llm.engine.config.max_num_seqs, vocab_size, device=facts.device)

    def forward(*, input_ids: Any, logits_to_keep: Any, kv_batch: Any, **_: Any) -> SimpleNamespace:
        kv_batch = kv_batch.batch if isinstance(kv_batch, Narrowed) else kv_batch
        tokens = input_ids.shape[-1]
        slots = kv_batch.batch.slot_mapping
        for layer in kv_batch.cache.layers:
            kv_batch.ops.write_kv(layer, keys[:tokens], values[:tokens], slots)
        return SimpleNamespace(logits=logits[: logits_to_keep.numel()][None])

    with patch.object(model, "forward", forward), patch.object(llm.engine.runner, "graphs", None):
        yield


def _noise(facts: ModelFacts, dim: int) -> torch.Tensor:
    """[CHUNK, K, dim] normal numbers in the model's dtype."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(CHUNK, facts.layers[0].num_kv_heads, dim, generator=generator)
    return noise.to(facts.device, facts.dtype)
