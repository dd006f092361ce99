"""Hooks on the layers of vLLM 0.32, for policies that look at recent queries or at hidden states.

PyTorch's own hooks, on the instances of one model: they run in the V1 runner without torch.compile and CUDA
graphs, which the front end has checked. Queries are seen as vLLM's Attention is given them, rotated and not
yet quantised; hidden states as the module around it is.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvreclaim.compression.policy import Signal
from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.refusals import signatures
from kvreclaim.integrations.vllm.v0_32 import probing
from kvreclaim.integrations.vllm.worker.layer_signals import KeptSignals, StepTokens

HIDDEN = "hidden_states"
"""What modules around Attention call their input."""
REMEDY = "take a policy without it, such as surrogate or knorm"


class Sight(Protocol):
    """Receives the inputs of layers."""

    def see_queries(self, layer: int, queries: Tensor) -> None: ...

    def see_hidden(self, layer: int, hidden: Tensor) -> None: ...


class LayerWatch:
    """Hooks on the compressed layers.

    sight: receives their inputs; None: inputs are dropped, because the run is not of requests
    """

    def __init__(self, runner: Any, needs: frozenset[Signal]) -> None:
        """Raises: UnsupportedModelError."""
        self.signals: KeptSignals | None = None
        self.sight: Sight | None = None
        self._handles: list[Any] = []
        for n, layer in enumerate(probing.attention_layers(runner)):
            if Signal.RECENT_QUERIES in needs:
                self._hook(layer, "query", n, lambda sight, *seen: sight.see_queries(*seen))
            if Signal.TOKEN_SCORES in needs:
                self._hook(_around(runner, layer), HIDDEN, n, lambda sight, *seen: sight.see_hidden(*seen))

    def show_to(self, signals: KeptSignals) -> None:
        self.signals = signals

    def begin(self, step: StepTokens | None) -> None:
        """Set the tokens that run next; None: not of requests."""
        self.sight = None if step is None else self.signals
        if step is not None and self.signals is not None:
            self.signals.begin(step)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: nn.Module, name: str, layer: int, show: Any) -> None:
        place = list(inspect.signature(module.forward).parameters).index(name)

        def seen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.sight is not None:
                show(self.sight, layer, kwargs[name] if name in kwargs else args[place])

        self._handles.append(module.register_forward_pre_hook(seen, with_kwargs=True))


class Glimpse:
    """The recorded inputs of one run of the model, by layer."""

    def __init__(self) -> None:
        self.queries: dict[int, Tensor] = {}
        self.hidden: dict[int, Tensor] = {}

    def see_queries(self, layer: int, queries: Tensor) -> None:
        self.queries[layer] = queries.clone()

    def see_hidden(self, layer: int, hidden: Tensor) -> None:
        self.hidden[layer] = hidden


class WatchingHooks:
    """Over a V1 runner: passes the tokens of a step to the watch."""

    reclaim_watch: LayerWatch

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        batch: Any = self.input_batch  # type: ignore[attr-defined]
        firsts = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        chunks = tuple(zip(batch.req_ids, firsts, map(int, num_scheduled_tokens), strict=True))
        # The buffer itself: by the time that layers run it has the slots of compressed requests.
        slots = batch.block_table[0].slot_mapping.gpu[: scheduler_output.total_num_scheduled_tokens]
        self.reclaim_watch.begin(StepTokens(chunks, slots))
        return result

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        self.reclaim_watch.begin(None)
        return super()._dummy_run(*args, **kwargs)  # type: ignore[misc]


def watch_layers(runner: Any, needs: frozenset[Signal]) -> LayerWatch:
    """Hook the layers for these signals, and check the hooks on one token. All ranks have
    to call it together. Idempotent; a later watch takes the place of an earlier one.

    Raises: UnsupportedModelError, UnsupportedVllmError.
    """
    signatures.check_signals()
    if isinstance(runner, WatchingHooks):
        runner.reclaim_watch.remove()
    watch = LayerWatch(runner, needs)
    _prove(runner, watch, needs)
    runner.reclaim_watch = watch
    if not isinstance(runner, WatchingHooks):
        runner.__class__ = type(f"Watching{type(runner).__name__}", (WatchingHooks, type(runner)), {})
    return watch


def _around(runner: Any, layer: nn.Module) -> nn.Module:
    """Return the module that contains the layer and takes hidden states."""
    for module in runner.get_model().modules():
        is_given = HIDDEN in inspect.signature(module.forward).parameters
        if is_given and any(child is layer for child in module.children()):
            return module
    raise UnsupportedModelError(
        f"{runner.model_config.model} has no module around {layer.layer_name} that is given {HIDDEN}, by "
        f"which the policy scores tokens; {REMEDY}."
    )


def _prove(runner: Any, watch: LayerWatch, needs: frozenset[Signal]) -> None:
    """Run the model on one token: every layer must show the queries that its attention is given, and a hidden
    state of the model's size. Raises: UnsupportedModelError."""
    layers, seen = probing.attention_layers(runner), Glimpse()
    watch.sight = seen
    recorded = probing.record(runner, layers)
    watch.sight = None
    size = probing.hidden_size(runner)
    for n, (layer, given) in enumerate(zip(layers, recorded, strict=True)):
        queries, hidden = seen.queries.get(n), seen.hidden.get(n)
        same = queries is not None and torch.equal(queries.view_as(given.queries), given.queries)
        wrong = {
            "queries": Signal.RECENT_QUERIES in needs and not same,
            f"hidden states of {size} numbers": Signal.TOKEN_SCORES in needs
            and (hidden is None or hidden.shape != (len(given.queries), size)),
        }
        for what, holds in wrong.items():
            if holds:
                raise UnsupportedModelError(
                    f"a hook on {layer.layer_name} does not see its {what}, which the policy asks for; "
                    f"{REMEDY}."
                )
