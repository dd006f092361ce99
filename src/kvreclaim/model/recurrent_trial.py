"""Trial runs of a hybrid model: its recurrent layers are found by their calls of transformers' cache while
the model computes trial tokens. At start the model is proved: a text cut into steps, next to another one, has
to give the logits that one pass over it gives.
"""

from __future__ import annotations

import inspect
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.recurrent import RecurrentLayers, no_attention
from kvreclaim.ops.states import StateKind, StateRun, StateShape, StateStep, StateStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIAL_TOKENS = 7
PROOF_LENGTHS = ((9, 1, 1, 3, 1), (4, 1, 2, 1, 6))
"""Two texts, each cut into steps of so many tokens."""
TOLERANCE = {torch.float32: 2.0**-5, torch.bfloat16: 2.0**-3, torch.float16: 2.0**-4}
"""Largest difference over the largest value. A lost state differs by most of itself; what transformers
computes of prompts and of single tokens differs by up to .013 (Zamba 2)."""


class _RecordingCache(DynamicCache):
    """transformers' own cache for trial tokens, with a record of the calls by module."""

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
        """Return the shapes of a layer's states."""
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
    recorder, batch = _trial(model, name)
    if not batch.modules:
        raise UnsupportedModelError(no_attention(name, model.config))
    if len(set(batch.modules)) < len(batch.modules):
        raise UnsupportedModelError(
            f"{name} ({model.config.model_type}) attends with the same weights at several places "
            f"({len(batch.modules)} places, {len(set(batch.modules))} layers), which one block table cannot "
            "tell apart; use a model whose attention layers are its own."
        )
    layers = RecurrentLayers(len(batch.modules))
    for module, (layer, argument) in recorder.found.items():
        if argument is None or "hidden_states" not in inspect.signature(module.forward).parameters:
            raise UnsupportedModelError(
                f"{name} ({model.config.model_type}) hands its {type(module).__name__} no cache by name, so "
                "its state cannot be paged; use a model of a family that docs/models.md lists."
            )
        layers.add(module, argument, recorder.shapes(layer))
    for number, module in enumerate(batch.modules):
        module.layer_idx = number  # type: ignore[assignment]
    return layers


@torch.inference_mode()
def _trial(model: PreTrainedModel, name: str) -> tuple[_RecordingCache, _OwnValues]:
    """Compute trial tokens over transformers' own cache."""
    try:
        recorder = _RecordingCache(model.config.get_text_config())
    except Exception as error:
        raise UnsupportedModelError(
            f"transformers makes no cache for the layers of {name} ({model.config.model_type}): {error}"
        ) from error
    batch = _OwnValues(recorder.calls)
    known = [module for module in model.modules() if hasattr(module, "layer_idx")]
    handles = [module.register_forward_pre_hook(recorder.entered, with_kwargs=True) for module in known]
    handles += [module.register_forward_hook(recorder.left) for module in known]
    try:
        named = "cache" in inspect.signature(model.forward).parameters
        cache: dict[str, Any] = {"cache" if named else "past_key_values": recorder}
        _run(model, _tokens(model, 0, TRIAL_TOKENS), batch, use_cache=True, **cache)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} ({model.config.model_type}) does not run over transformers' cache and kvreclaim's "
            f"attention ({type(error).__name__}: {error}); use a model of a family that docs/models.md lists."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return recorder, batch


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
    """Compute two texts in steps, in one batch, and each in one pass. If that agrees only where layers
    that are not native get tokens behind a state one by one (Mamba-1: transformers' scan begins at zero),
    they do from now on.

    Raises: UnsupportedModelError if logits or states differ.
    """
    for by_token in (False, True):
        for mixer in layers.mixers:
            if mixer.native is None:
                mixer.go_by_token(by_token)
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
