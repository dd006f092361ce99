"""Recurrent layers of a transformers model (Mamba, linear attention, short convolutions) over paged states.

Their forward is called once for each sequence of a packed step, and once for all rows that decode, with
the states of the step. recurrent_trial.py finds the layers and proves the model. A layer that runs
natively (native_mixers.py) takes all rows of a step in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvreclaim.ops.states import (
    PackedRuns,
    StateCall,
    States,
    StateShape,
    StateStep,
    StateStore,
)

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "conv", "mlp", "moe"})
"""Types of layers that do not attend."""


class StateView:
    """States of a recurrent layer in one call: the part of transformers' Cache that such layers
    use. states: [n, ...] of n sequences; None: they begin"""

    def __init__(self, shapes: tuple[StateShape, ...], states: States | None) -> None:
        self._sizes = {(one.kind, one.index): one.shape[-1] for one in shapes}
        self._has_past = states is not None
        self.states: States = {} if states is None else states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._has_past

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # What transformers before 5.24 reads of a layer's entry in the cache.

    record_past = False

    @property
    def layers(self) -> StateView:
        return self

    def __getitem__(self, layer_idx: int) -> StateView:
        return self

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return self._of("conv")

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return self._of("recurrent")

    def _of(self, kind: str) -> dict[int, Tensor]:
        return {index: state for (own, index), state in self.states.items() if own == kind}

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Returns: the inputs of the convolution, those before included; keeps the last ones."""
        size, found = self._sizes["conv", state_idx], conv_states
        if self._has_past:
            found = torch.cat([self.states["conv", state_idx], conv_states], -1)
        kept = found[..., -size:]
        self.states["conv", state_idx] = nn.functional.pad(kept, (size - kept.shape[-1], 0))
        return found

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states


class RecurrentLayers:
    """The recurrent layers of one model; `step` sets their states for a forward pass. Without a step they
    compute all tokens as those of one text that begins, or of several (`beginning`), and keep nothing.

    num_attention: layers that attend; they are numbered from 0
    """

    def __init__(self, num_attention: int) -> None:
        self.num_attention = num_attention
        self.mixers: list[Mixer] = []
        self.step: StateStep | None = None
        self.lengths: Sequence[int] | None = None

    def add(self, module: nn.Module, name: str, shapes: tuple[StateShape, ...]) -> None:
        """Take over a module's forward. name: of the argument that brings its cache"""
        mixer = Mixer(self, module, name, len(self.mixers), shapes)
        self.mixers.append(mixer)
        module.forward = mixer

    @property
    def shapes(self) -> list[tuple[StateShape, ...]]:
        """Shapes of each layer's states of a sequence."""
        return [mixer.shapes for mixer in self.mixers]

    def describe(self) -> str:
        """Text for the engine's start line."""
        slow = any(mixer.by_token and mixer.native is None for mixer in self.mixers)
        return "; prompts after a state token by token" if slow else ""

    def begin(self, step: StateStep) -> None:
        """Begin a pass with this step."""
        self.step = step

    def end(self) -> None:
        """End the pass."""
        self.step = None

    @contextmanager
    def stepping(self, step: StateStep) -> Iterator[None]:
        """Set this step within a context."""
        self.begin(step)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def beginning(self, lengths: Sequence[int]) -> Iterator[None]:
        """Within a context, passes without a step are over independent texts of these lengths."""
        self.lengths = lengths
        try:
            yield
        finally:
            self.lengths = None


class Mixer:
    """The forward of one recurrent layer.

    native:   computes its part of a step, where the layer's own code need not
    by_token: the layer's own code gets tokens behind a state one by one
    """

    def __init__(
        self, owner: RecurrentLayers, module: Any, name: str, layer: int, shapes: tuple[StateShape, ...]
    ) -> None:
        self.owner, self.module, self.name, self.layer, self.shapes = owner, module, name, layer, shapes
        self.forward = module.forward
        self.native: Callable[[Tensor, States, PackedRuns], Tensor] | None = None
        self.by_token = False

    def use_native(self, native: Callable[[Tensor, States, PackedRuns], Tensor] | None) -> None:
        """Compute steps by this; None: by the layer's own code."""
        self.native = native

    def go_by_token(self, is_needed: bool) -> None:
        """Give the layer's own code tokens behind a state one by one, or together."""
        self.by_token = is_needed

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        step = self.owner.step
        if step is None:
            texts = hidden_states.split(self.owner.lengths or hidden_states.shape[1], dim=1)
            return torch.cat([self.forward(text, *args, **kwargs) for text in texts], dim=1)
        rows = hidden_states[0]
        packed = None if self.native is None or torch.is_grad_enabled() else step.packed
        if self.native is not None and packed is not None and rows.is_contiguous():
            return self.native(rows, step.store.layers[self.layer], packed)[None]
        return self.by_own_code(step, rows, kwargs, self.layer)[None]

    def by_own_code(self, step: StateStep, rows: Tensor, kwargs: dict[str, Any], layer: int) -> Tensor:
        """All rows of a step, call by call, over a layer's states."""
        parts = [self._compute(step.store, call, rows[call.rows], kwargs, layer) for call in step.calls]
        if len(parts) == 1 and isinstance(step.calls[0].rows, slice):
            return parts[0]
        out = parts[0].new_empty((rows.shape[0], parts[0].shape[-1]))
        for call, part in zip(step.calls, parts, strict=True):
            out[call.rows] = part
        return out

    def _compute(
        self, store: StateStore, call: StateCall, x: Tensor, kwargs: dict[str, Any], layer: int
    ) -> Tensor:
        view = StateView(self.shapes, None if call.read is None else store.gather(layer, call.read))
        given, dim = {**kwargs, self.name: view}, 1 if call.decode else 0
        if self.by_token and call.read is not None and not call.decode:
            out = torch.cat([self.forward(token[None, None], **given) for token in x], 1)
        else:
            out = self.forward(x.unsqueeze(dim), **given)
        if call.write is not None:
            store.put(layer, call.write, view.states)
        return out.squeeze(dim)


def is_hybrid(config: Any, model_class: Any) -> bool:
    """Return whether a config says that some layers are recurrent."""
    types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return bool(types - ATTENTION_LAYER_TYPES) or bool(getattr(model_class, "_is_stateful", False))


def no_attention(name: str, config: Any) -> str:
    """Error text for a model without attention layers."""
    return (
        f"{name} ({config.model_type}) has no attention layer, so there are no keys and values to page or "
        "compress; kvreclaim serves models with softmax attention in some layers."
    )
