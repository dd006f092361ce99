"""Settings of an engine and a request that the loss curve of max_loss covers.

Those in ENGINE_MEASURED, and in `measured` of a request's features (engine/feature.py), change what
compression loses; the curve is measured under the listed values, and max_loss refuses any other.
tests/engine/test_max_loss.py lists the settings that change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvreclaim.errors import InvalidArgumentError

ENGINE_MEASURED: Mapping[str, tuple[Any, ...]] = {
    "spread_compression": (True,),
    "conversation_snapshots": (False,),
    "quantized_activations": ("auto",),
    "hf_overrides": (None,),
    "kv_cache_dtype_skip_layers": ((),),
    "sparse_prefill": ("dense",),
}
REMEDY = "or give a budget instead of max_loss"


def refuse_unmeasured(max_loss: float, given: object, measured: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse settings under which the loss was not measured. Raises: InvalidArgumentError."""
    for name, values in measured.items():
        value = getattr(given, name)
        if value not in values:
            raise InvalidArgumentError(
                f"max_loss is {max_loss}, but losses are measured with {name} {values[0]!r}, and it is "
                f"{value!r:.60}; leave {name} out, {REMEDY}.",
                field=name,
            )


def refuse_chunk(max_loss: float, chunk: int, measured: int) -> None:
    """Refuse smaller prompt chunks than the loss was measured with. Raises: InvalidArgumentError."""
    if chunk < measured:
        raise InvalidArgumentError(
            f"max_loss is {max_loss}, but losses are measured with prompts computed {measured} tokens at a "
            f"time, and max_num_batched_tokens is {chunk}; raise it to {measured}, {REMEDY}.",
            field="max_num_batched_tokens",
        )


def refuse_tail(max_loss: float, at: int, num_prompt: int, measured: int) -> None:
    """Refuse a longer text after a compressed prefix than was measured. Raises: InvalidArgumentError."""
    if num_prompt - at > measured:
        raise InvalidArgumentError(
            f"max_loss is {max_loss}, but losses are measured on {measured} tokens behind a compressed text, "
            f"and {num_prompt - at} tokens of the prompt follow compress_prompt_at {at}; leave "
            f"compress_prompt_at out, {REMEDY}.",
            field="compress_prompt_at",
        )
