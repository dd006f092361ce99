"""What our workers add to vLLM's: the check at start, the passes, their figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from kvreclaim.integrations.vllm import family, signatures
from kvreclaim.integrations.vllm.applier import Applier
from kvreclaim.integrations.vllm.facts import describe
from kvreclaim.integrations.vllm.layouts import CacheViews
from kvreclaim.integrations.vllm.options import Options
from kvreclaim.integrations.vllm.refusals import refuse_groups, refuse_layers
from kvreclaim.integrations.vllm.scratch import scratch_bytes
from kvreclaim.integrations.vllm.tracing import Trace

if TYPE_CHECKING:
    from kvreclaim.integrations.vllm.v0_32 import attention, probing, worker_side
else:
    attention, probing, worker_side = map(family.module, ("attention", "probing", "worker"))


class WorkerHooks:
    """Over a vLLM worker. Every hook calls vLLM's own first."""

    reclaim: Applier | None = None

    def init_device(self) -> None:
        """Raises: UnsupportedVllmError if this vLLM's runner is not the one that we were written for."""
        super().init_device()  # type: ignore[misc]
        worker: Any = self
        signatures.check_worker(worker.model_runner)

    def determine_available_memory(self) -> int:
        """On a GPU less what a pass needs for a moment, which vLLM's profile does not see. A pool whose bytes
        the operator has set stays as it is."""
        available = int(super().determine_available_memory())  # type: ignore[misc]
        worker: Any = self
        if worker.device.type == "cpu" or worker.cache_config.kv_cache_memory_bytes:
            return available
        return max(0, available - _scratch(worker))

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Raises: UnsupportedModelError, UnsupportedVllmError, InvalidArgumentError, StatsMismatchError."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        worker: Any = self
        runner = worker.model_runner
        refuse_groups(runner.kv_cache_config)
        layers = probing.attention_layers(runner)
        refuse_layers({layer.layer_name: layer for layer in layers})
        signatures.check_layers(layers)
        with torch.inference_mode():
            views = CacheViews(attention.layer_caches(runner), attention.num_blocks(runner))
            views.prove()
        options = Options.of_config(worker.vllm_config)
        known = describe(runner, options)
        self.reclaim = Applier(options, known.facts, known.stats, views, worker_side.rows_of(runner))
        worker_side.adopt(runner, self.reclaim)
        if worker.device.type != "cpu":
            self.reclaim.rehearse()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The seconds of passes go back with the output."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        applier = self.reclaim
        if applier is not None and (carrier := worker_side.carrier(output)) is not None:
            seconds = applier.take_seconds()
            if seconds is not None:
                carrier.kvreclaim = seconds
        return output

    def kvreclaim_trace(self, on: bool) -> None:
        """Record which positions passes keep, of requests whose first pass is still to come."""
        self._applier().trace = Trace() if on else None

    def kvreclaim_take_trace(self) -> list[tuple[str, int, torch.Tensor]]:
        """(request, position of the next query, positions kept [L, K, keep] int32) of every pass since the
        last call, of this worker's heads; [] while nothing is recorded."""
        trace = self._applier().trace
        return [] if trace is None else trace.take()

    def kvreclaim_figures(self) -> dict[str, float]:
        """Sums since the start, of this worker."""
        return asdict(self._applier().figures)

    def _applier(self) -> Applier:
        assert self.reclaim is not None, "asked before the cache is there"
        return self.reclaim


def _scratch(worker: Any) -> int:
    """Bytes of a pass over as many tokens as a request ever holds here. What it hits in the prefix cache is
    not bounded by its budget."""
    config, model = worker.vllm_config, worker.model_config
    chunk = config.scheduler_config.max_num_batched_tokens
    bound = Options.of_config(config).bound(worker.cache_config.block_size, chunk)
    if bound is None or worker.cache_config.enable_prefix_caching:
        bound = model.max_model_len
    return scratch_bytes(
        num_layers=model.get_num_layers(worker.parallel_config),
        num_heads=model.get_num_attention_heads(worker.parallel_config),
        num_kv_heads=model.get_num_kv_heads(worker.parallel_config),
        head_dim=model.get_head_size(),
        num_tokens=min(bound, model.max_model_len),
    )
