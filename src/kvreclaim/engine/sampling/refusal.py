"""The refusal of options that leave no token."""

from __future__ import annotations

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.sampling_params import SamplingParams

STRUCTURED = "the grammar of the answer (structured_outputs, response_format or calls)"


def conflict(params: SamplingParams, *, is_early: bool, is_structured: bool) -> InvalidArgumentError:
    """Return the refusal of options that leave no token. is_early: min_tokens bars tokens still"""
    given = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": is_early,
        "structured_outputs": is_structured,
    }
    names = [name for name, is_given in given.items() if is_given]
    told = [STRUCTURED if name == "structured_outputs" else name for name in names]
    return InvalidArgumentError(
        f"{' and '.join(told)} {'leave' if len(told) > 1 else 'leaves'} no token that may come next; "
        f"change {'one of them' if len(told) > 1 else 'it'}.",
        field=names[0] if names else None,
    )
