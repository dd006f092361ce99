"""Prompts in pieces, some of which are chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvreclaim.chunks import Chunk, ChunkReuse, Chunks

Piece = Chunk | str | list[int]


def laid_out(
    pieces: Sequence[Piece], how: ChunkReuse, encode: Callable[[str, bool], list[int]]
) -> tuple[list[int], Chunks]:
    """The prompt's tokens, and where chunks stand among them.

    encode: (text, whether the prompt begins with it) to tokens; each piece is encoded alone

    Raises: InvalidArgumentError.
    """
    tokens: list[int] = []
    spans = []
    for piece in pieces:
        content = piece.content if isinstance(piece, Chunk) else piece
        own = encode(content, not tokens) if isinstance(content, str) else list(content)
        if isinstance(piece, Chunk) and own:
            spans.append((len(tokens), len(tokens) + len(own)))
        tokens += own
    return tokens, Chunks(tuple(spans), how)
