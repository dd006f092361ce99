"""Where an answer's text meets the prompt's."""

from __future__ import annotations

from kvreclaim.engine.face.exports import Tokenizer

JOINT = 6
"""Tokens of a prompt's end that decide how the answer's first token is joined to it."""


def joint(tokenizer: Tokenizer, prompt: list[int], token_id: int) -> str:
    """What a text that is decoded on its own lacks at its beginning, such as a space."""

    def text(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    end = prompt[-JOINT:]
    before, both, alone = text(end), text([*end, token_id]), text([token_id])
    added = both.removeprefix(before)
    return added.removesuffix(alone) if both.startswith(before) and added.endswith(alone) else ""
