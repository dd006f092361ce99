"""Checks of what a GGUF file's header says."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from kvreclaim.checks import is_int

EMBEDDING = "token_embd.weight"
MAX_NUMBER = (1 << 31) - 1
SHOWN = 60
"""Characters of the file's text that an error quotes."""
TEXTS = frozenset({"general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "rope.scaling.type"})
SIZES = frozenset(
    {
        *("embedding_length", "feed_forward_length", "vocab_size", "block_count", "rope.dimension_count"),
        *(f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")),
    }
)
COUNTS = SIZES | {
    *("context_length", "attention.sliding_window", "rope.scaling.original_context_length"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
}
NUMBERS = frozenset(
    {
        *("rope.freq_base", "rope.freq_base_swa", "rope.scale_linear", "attention.layer_norm_rms_epsilon"),
        *("attn_logit_softcapping", "final_logit_softcapping", "rope.scaling.factor"),
        *("rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    }
)
"""Fields of an architecture that are integers, or numbers, and what both have to be: not negative, finite."""


TEMPLATE_NAME = re.compile(r"tokenizer\.chat_template\.[\w-]{1,64}", re.ASCII)


def quoted(text: str) -> str:
    """Text of a file as an error shows it: its beginning, on one line, without control characters."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises: ValueError for a field that is of another type than its readers need."""
    own = f"{fields.get('general.architecture')}."
    for key, value in fields.items():
        needed = _needed(key.replace(own, "", 1) if key.startswith(own) else key, value, key.startswith(own))
        if needed is not None:
            shown = quoted(value) if isinstance(value, str) else value
            raise ValueError(f"{quoted(key)} is {shown}; it must be {needed}")


def _needed(key: str, value: object, is_own: bool) -> str | None:
    """What a field has to be, where its value is something else. is_own: of the architecture"""
    if is_own and isinstance(value, float) and key not in COUNTS:
        fits = math.isfinite(value) and (value >= 0 or key not in NUMBERS)
        return None if fits else "a finite number"
    if is_own and is_int(value):
        return None if 0 <= int(value) <= MAX_NUMBER else f"from 0 to {MAX_NUMBER}"  # type: ignore[call-overload]
    if is_own and (key in COUNTS or key in NUMBERS):
        return "an integer" if key in COUNTS else "a number"
    if key.startswith("tokenizer.chat_template.") and not TEMPLATE_NAME.fullmatch(key):
        return "under a name of letters, digits, _ and -"  # files are named so
    if key in TEXTS or key.startswith("tokenizer.chat_template"):
        return None if isinstance(value, str) else "text"
    if key.startswith("tokenizer.ggml.add_"):
        return None if isinstance(value, bool) else "true or false"
    number = value if isinstance(value, int) and is_int(value) else -1
    if key == "general.alignment":
        return None if 0 < number <= MAX_NUMBER and number & number - 1 == 0 else "a power of two"
    if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
        return None if 0 <= number <= MAX_NUMBER else "a token id"
    return None
