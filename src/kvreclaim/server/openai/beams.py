"""Beam search in a request: vLLM's `use_beam_search`, and what goes with it."""

from __future__ import annotations

from kvreclaim.beams import BeamSearchParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.errors import ApiError
from kvreclaim.server.openai.fields import GenerationFields

ONLY_HERE = ("beam_width", "length_penalty", "early_stopping")
DRAWN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "stream",
)
"""Fields of tokens that are drawn one after the other."""
HARMLESS = {"skip_special_tokens": True}
"""The values that change nothing; False of the others."""


def beams_of(fields: GenerationFields, max_tokens: int) -> BeamSearchParams | None:
    """The search that a request asks for; None: it asks for none. Raises: ApiError naming the field."""
    if not fields.use_beam_search:
        for name in ONLY_HERE:
            if getattr(fields, name) is not None:
                raise ApiError(
                    400, f"{name} is set, but use_beam_search is not true; set it, or leave {name} out.", name
                )
        return None
    for name in DRAWN:
        value = getattr(fields, name, None)
        changes_nothing = value is None or value is HARMLESS.get(name, False)
        if not changes_nothing and not (name == "temperature" and value == 0):
            raise ApiError(
                400, f"{name} does not go with use_beam_search, which draws no tokens; leave one out.", name
            )
    wanted = fields.n or 1
    given = {name: getattr(fields, name) for name in ("length_penalty", "early_stopping", "ignore_eos")}
    try:
        return BeamSearchParams(
            beam_width=fields.beam_width or wanted,
            num_return_sequences=wanted,
            max_tokens=max_tokens,
            **{name: value for name, value in given.items() if value is not None},
        )
    except InvalidArgumentError as error:
        named = "n" if error.field == "num_return_sequences" else error.field
        raise ApiError(400, str(error), named if named in type(fields).model_fields else None) from error
