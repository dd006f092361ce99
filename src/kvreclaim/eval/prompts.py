"""Converts the prompts of items for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvreclaim.chunks import Chunk, chunk_reuse_of
from kvreclaim.engine.api.prompts import Piece
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.plan import GridColumn
from kvreclaim.eval.task import Item


def engine_prompts(items: Sequence[Item], setting: GridColumn) -> list[dict[str, Any]]:
    """Return whole prompts, or their pieces. Raises: InvalidArgumentError for prompts without chunks if these
    are to be reused."""
    how, method = chunk_reuse_of(setting.chunk_reuse), {"sparse_prefill": setting.sparse_prefill}
    if how is None:
        if setting.evicts:
            return [
                {"prompt_token_ids": list(item.prompt), "compress_prompt_at": item.compress_at, **method}
                for item in items
            ]
        return [{"prompt_token_ids": list(item.prompt), **method} for item in items]
    if not all(item.chunks for item in items):
        raise InvalidArgumentError(
            f"chunk reuse {setting.chunk_reuse} is for prompts with chunks, and this task has none; take "
            "needles:chunks, table:chunks or assignments:chunks, or whole."
        )
    return [{"prompt": _pieces(item), "chunk_reuse": how, **method} for item in items]


def _pieces(item: Item) -> list[Piece]:
    prompt, end = list(item.prompt), 0
    pieces: list[Piece] = []
    for first, stop in item.chunks:
        pieces += [prompt[end:first], Chunk(prompt[first:stop])]
        end = stop
    return [piece for piece in [*pieces, prompt[end:]] if piece]
