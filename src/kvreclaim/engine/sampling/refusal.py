"""The refusal of options that leave no token."""

from __future__ import annotations

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.sampling_params import SamplingParams

GRAMMAR = "the grammar of the answer (structured_outputs, response_format or calls)"


def conflict(params: SamplingParams, *, is_early: bool) -> InvalidArgumentError:
    """Return the refusal of options that leave no token. is_early: min_tokens still bars tokens"""
    options = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": is_early,
        "structured_outputs": params.structured_outputs is not None,
    }
    names = [name for name, is_set in options.items() if is_set]
    text = " and ".join(GRAMMAR if name == "structured_outputs" else name for name in names)
    verb, changed = ("leave", "one of them") if len(names) > 1 else ("leaves", "it")
    return InvalidArgumentError(
        f"{text} {verb} no token that may come next; change {changed}.", field=names[0] if names else None
    )
