"""Recurrent layers of a transformers model (Mamba, linear attention, short convolutions) over paged states.

A recurrent layer is found by what it asks of transformers' cache while the model computes trial tokens. Its
forward is then called once for each sequence of a packed step, and once for all rows that decode, with the
states that the step says. The model is proved at start: a text cut into steps, beside another one, has to
give the logits that one pass over it gives. A layer that runs natively (native_mixers.py) takes all rows of a
step in one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.states import (
    PackedRuns,
    StateCall,
    StateKind,
    StateRun,
    States,
    StateShape,
    StateStep,
    StateStore,
)

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "conv", "mlp", "moe"})
"""Types of layers that do not attend."""
TRIAL_TOKENS = 7
PROOF_LENGTHS = ((9, 1, 1, 3, 1), (4, 1, 2, 1, 6))
"""Two texts, each cut into steps of so many tokens."""
TOLERANCE = {torch.float32: 2.0**-5, torch.bfloat16: 2.0**-3, torch.float16: 2.0**-4}
"""Largest difference over the largest value. A lost state differs by most of itself; what transformers
computes of prompts and of single tokens differs by up to .013 (Zamba 2)."""


class StateView:
    """What a recurrent layer sees of its states in one call: the part of transformers' Cache that such layers
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
    """The recurrent layers of one model; `step` says what they do in a forward pass. Without a step they
    compute all tokens as those of one text that begins, or of several (`beginning`), and keep nothing.

    num_attention: layers that attend; they are numbered from 0
    by_token:      tokens behind a state are computed one by one
    """

    def __init__(self, num_attention: int) -> None:
        self.num_attention = num_attention
        self.by_token = False
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
        """What each layer keeps of a sequence."""
        return [mixer.shapes for mixer in self.mixers]

    def describe(self) -> str:
        """For the line at the engine's start."""
        slow = self.by_token and any(mixer.native is None for mixer in self.mixers)
        return "; prompts behind a state token by token" if slow else ""

    def begin(self, step: StateStep) -> None:
        """The next pass is this step."""
        self.step = step

    def end(self) -> None:
        """The pass is over."""
        self.step = None

    @contextmanager
    def stepping(self, step: StateStep) -> Iterator[None]:
        """For a while, with this step."""
        self.begin(step)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def beginning(self, lengths: Sequence[int]) -> Iterator[None]:
        """For a while, passes without a step are over texts of these lengths, which do not see each other."""
        self.lengths = lengths
        try:
            yield
        finally:
            self.lengths = None


class Mixer:
    """The forward of one recurrent layer.

    native: computes its part of a step, where the layer's own code need not
    """

    def __init__(
        self, owner: RecurrentLayers, module: Any, name: str, layer: int, shapes: tuple[StateShape, ...]
    ) -> None:
        self.owner, self.module, self.name, self.layer, self.shapes = owner, module, name, layer, shapes
        self.forward = module.forward
        self.native: Callable[[Tensor, States, PackedRuns], Tensor] | None = None

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
        if self.owner.by_token and call.read is not None and not call.decode:
            out = torch.cat([self.forward(token[None, None], **given) for token in x], 1)
        else:
            out = self.forward(x.unsqueeze(dim), **given)
        if call.write is not None:
            store.put(layer, call.write, view.states)
        return out.squeeze(dim)


def is_hybrid(config: Any, model_class: Any) -> bool:
    """Whether a config says that some layers are recurrent."""
    types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return bool(types - ATTENTION_LAYER_TYPES) or bool(getattr(model_class, "_is_stateful", False))


def no_attention(name: str, config: Any) -> str:
    """What is said of a model none of whose layers attends."""
    return (
        f"{name} ({config.model_type}) has no attention layer, so there are no keys and values to page or "
        "compress; kvreclaim serves models with softmax attention in some layers."
    )


class _Asked(DynamicCache):
    """transformers' own cache for trial tokens, and which module asked it for what."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.calls: list[tuple[nn.Module, str | None]] = []
        self.found: dict[nn.Module, tuple[int, str | None]] = {}

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self.found.setdefault(self.calls[-1][0], (layer_idx, self.calls[-1][1]))
        out: Tensor = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        return out

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.found.setdefault(self.calls[-1][0], (layer_idx, self.calls[-1][1]))
        out: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        return out

    def entered(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.calls.append((module, next((name for name, value in kwargs.items() if value is self), None)))

    def left(self, module: nn.Module, args: Any, out: Any) -> None:
        self.calls.pop()

    def shapes(self, layer: int) -> tuple[StateShape, ...]:
        """What it has kept of a layer."""
        own: Any = self.layers[layer]
        kinds: tuple[tuple[StateKind, Any], ...] = (
            ("conv", own.conv_states),
            ("recurrent", own.recurrent_states),
        )
        return tuple(
            StateShape(kind, index, tuple(state.shape[1:]), state.dtype)
            for kind, states in kinds
            for index, state in states.items()
            if state is not None
        )


class _OwnValues:
    """A KVBatch that gives each token its own value, and notes which modules attend."""

    def __init__(self, calls: list[tuple[nn.Module, str | None]]) -> None:
        self._calls, self.modules = calls, list[nn.Module]()

    def attend(self, call: AttentionCall) -> Tensor:
        if self._calls:
            self.modules.append(self._calls[-1][0])
        count = call.q.shape[0]  # the trial's cache may hand down earlier tokens, too
        return call.v[-count:].repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)


def use_recurrent_states(model: PreTrainedModel, name: str) -> RecurrentLayers:
    """Take over the recurrent layers of a hybrid model, and number its attention layers 0, 1, ...

    Raises: UnsupportedModelError if none attends, one attends at several places, or a recurrent layer does
        not take its state from transformers' cache.
    """
    asked, batch = _trial(model, name)
    if not batch.modules:
        raise UnsupportedModelError(no_attention(name, model.config))
    if len(set(batch.modules)) < len(batch.modules):
        raise UnsupportedModelError(
            f"{name} ({model.config.model_type}) attends with the same weights at several places "
            f"({len(batch.modules)} places, {len(set(batch.modules))} layers), which one block table cannot "
            "tell apart; use a model whose attention layers are its own."
        )
    layers = RecurrentLayers(len(batch.modules))
    for module, (layer, argument) in asked.found.items():
        if argument is None or "hidden_states" not in inspect.signature(module.forward).parameters:
            raise UnsupportedModelError(
                f"{name} ({model.config.model_type}) hands its {type(module).__name__} no cache by name, so "
                "its state cannot be paged; use a model of a family that docs/models.md lists."
            )
        layers.add(module, argument, asked.shapes(layer))
    for number, module in enumerate(batch.modules):
        module.layer_idx = number  # type: ignore[assignment]
    return layers


@torch.inference_mode()
def _trial(model: PreTrainedModel, name: str) -> tuple[_Asked, _OwnValues]:
    """Compute trial tokens over transformers' own cache."""
    try:
        asked = _Asked(model.config.get_text_config())
    except Exception as error:
        raise UnsupportedModelError(
            f"transformers makes no cache for the layers of {name} ({model.config.model_type}): {error}"
        ) from error
    batch = _OwnValues(asked.calls)
    known = [module for module in model.modules() if hasattr(module, "layer_idx")]
    handles = [module.register_forward_pre_hook(asked.entered, with_kwargs=True) for module in known]
    handles += [module.register_forward_hook(asked.left) for module in known]
    try:
        named = "cache" in inspect.signature(model.forward).parameters
        cache: dict[str, Any] = {"cache" if named else "past_key_values": asked}
        _run(model, _tokens(model, 0, TRIAL_TOKENS), batch, use_cache=True, **cache)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} ({model.config.model_type}) does not run over transformers' cache and kvreclaim's "
            f"attention ({type(error).__name__}: {error}); use a model of a family that docs/models.md lists."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return asked, batch


def _tokens(model: PreTrainedModel, text: int, count: int) -> Tensor:
    vocab_size = model.config.get_text_config().vocab_size
    return (torch.arange(count, device=model.device) * 7919 + 101 * text + 1) % vocab_size


def _run(
    model: PreTrainedModel, tokens: Tensor, batch: Any, positions: Tensor | None = None, **kwargs: Any
) -> Tensor:
    positions = torch.arange(len(tokens), device=tokens.device) if positions is None else positions
    out: Tensor = model(
        input_ids=tokens[None], position_ids=positions[None], kv_batch=batch, **{"use_cache": False, **kwargs}
    ).logits[0]
    return out.float()


def prove(model: PreTrainedModel, layers: RecurrentLayers, name: str) -> None:
    """Compute two texts in steps, beside each other, and each in one pass. If that agrees only where tokens
    behind a state are computed one by one (Mamba-1: transformers' scan begins at zero), they are from now on.

    Raises: UnsupportedModelError if logits or states differ.
    """
    for layers.by_token in (False, True):
        difference = _difference(model, layers)
        if difference <= TOLERANCE[model.dtype]:
            return
    raise UnsupportedModelError(
        f"the recurrent layers of {name} ({model.config.model_type}) give other logits or states in steps "
        f"than in one pass (by {difference:.2g} of the largest), so they keep something that is not in "
        "transformers' cache; use a model of a family that docs/models.md lists."
    )


@torch.inference_mode()
def _difference(model: PreTrainedModel, layers: RecurrentLayers) -> float:
    """Largest difference of logits and of states, each over the largest of its kind."""
    batch, device = _OwnValues([]), model.device
    texts = [_tokens(model, n, sum(lengths)) for n, lengths in enumerate(PROOF_LENGTHS)]
    store = StateStore(layers.shapes, 3 * len(texts), device)
    whole = []
    for n, text in enumerate(texts):
        with layers.stepping(StateStep(store, [StateRun(0, len(text), None, [3 * n])])):
            whole.append(_run(model, text, batch))
    done, parts = [0] * len(texts), [list[Tensor]() for _ in texts]
    last = [0] * len(texts)
    for counts in zip_longest(*PROOF_LENGTHS, fillvalue=0):
        rows = [torch.arange(a, a + n, device=device) for a, n in zip(done, counts, strict=True)]
        runs = list[StateRun]()
        for n, (start, count) in enumerate(zip(accumulate(counts, initial=0), counts, strict=False)):
            if count:
                slot = 3 * n + 1 + (last[n] == 3 * n + 1)
                runs.append(StateRun(start, count, last[n] or None, [slot]))
                last[n] = slot
            done[n] += count
        tokens = torch.cat([text[row] for text, row in zip(texts, rows, strict=True)])
        with layers.stepping(StateStep(store, runs)):
            logits = _run(model, tokens, batch, torch.cat(rows))
        for found, part in zip(parts, logits.split(list(counts)), strict=True):
            found.append(part)
    pairs = [(torch.cat(found), one) for found, one in zip(parts, whole, strict=True)]
    for n, slot in enumerate(last):
        pairs += zip(store.save(slot), store.save(3 * n), strict=True)
    return max(float((one - other).abs().max() / other.abs().max().clamp_min(1e-9)) for one, other in pairs)
