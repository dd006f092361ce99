"""Inputs of attention layers other than queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def hand_out_inputs(model: nn.Module) -> list[RemovableHandle]:
    """Let every attention layer pass on what it was given (after its norm), as AttentionCall.hidden. Only the
    instances change, and only calls with a KV batch; calling it again changes nothing.

    Returns: handles of what was not there before
    """
    return [
        module.register_forward_pre_hook(_with_input, with_kwargs=True)
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and _with_input not in module._forward_pre_hooks.values()
    ]


@contextmanager
def inputs_handed_out(model: nn.Module) -> Iterator[None]:
    """Hand inputs out within a context."""
    handles = hand_out_inputs(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hands_out_input(module: nn.Module) -> bool:
    """Return whether this attention layer does."""
    return _with_input in module._forward_pre_hooks.values()


def _with_input(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Keyword arguments go down to the attention function; of nested modules the innermost one decides."""
    if kwargs.get("kv_batch") is None:
        return None
    return args, {**kwargs, "layer_input": kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]}
