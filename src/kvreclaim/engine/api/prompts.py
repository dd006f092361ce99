"""Prompts and settings as callers write them, and the requests made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvreclaim.chunks import Chunk, ChunkReuse, Chunks
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.errors import InvalidArgumentError

Piece = Chunk | str | list[int]
Prompt = str | list[int] | Sequence[Piece] | Mapping[str, Any]
"""Text, token ids, a list of pieces with chunks ([Chunk(text), question]), or a mapping: text or pieces as
"prompt", or ids as "prompt_token_ids", and PROMPT_OPTIONS."""
PROMPT_OPTIONS = (
    "cache_salt",
    "compress_prompt_at",
    "conversation_snapshots",
    "drop_spans",
    "drop_at",
    "chunk_reuse",
    "sparse_prefill",
)
"""Further keys of a mapping, with RequestSpec's meanings; chunk_reuse is a ChunkReuse."""
Encode = Callable[[str, bool], list[int]]
"""(text, whether the prompt begins with it) to tokens."""


def as_list(prompts: Any) -> list[Prompt]:
    """One or several prompts as a list. Raises: InvalidArgumentError."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (list, tuple)):
        if _has_chunks(prompts):
            return [prompts]
        if prompts and not any(isinstance(p, (str, list, tuple, Mapping)) for p in prompts):
            return [list(prompts)]
        if all(isinstance(p, (str, list, tuple, Mapping)) for p in prompts):
            return list(prompts)
    raise InvalidArgumentError(
        f"prompts is a {type(prompts).__name__} ({str(prompts)[:40]}); pass text, a list of token ids, or a "
        "list of these (a tensor: .tolist()).",
        field="prompt",
    )


def request_of(prompt: Prompt, encode: Encode, **asked: Any) -> RequestSpec:
    """The request for a prompt. asked: RequestSpec's other fields. Raises: InvalidArgumentError."""
    content, options = _divided(prompt)
    reuse, chunks = options.pop("chunk_reuse", None), None
    if _has_chunks(content):
        tokens, chunks = laid_out(content, ChunkReuse() if reuse is None else reuse, encode)
    elif reuse is not None:
        raise InvalidArgumentError(
            "chunk_reuse is given, but the prompt has no chunks; pass pieces such as [Chunk(text), question] "
            "or leave chunk_reuse out.",
            field="chunk_reuse",
        )
    else:
        tokens = encode(content, True) if isinstance(content, str) else list(content)
    text = content if isinstance(content, str) else None
    return RequestSpec(prompt_token_ids=tokens, prompt=text, chunks=chunks, **options, **asked)


def laid_out(pieces: Sequence[Piece], how: ChunkReuse, encode: Encode) -> tuple[list[int], Chunks]:
    """The prompt's tokens, and where chunks stand among them; each piece is encoded alone.

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


def check_type(name: str, value: object, allowed: type) -> None:
    """Raises InvalidArgumentError unless value is one of these, which the caller makes."""
    if not isinstance(value, allowed):
        got = f"a {type(value).__name__} ({str(value)[:40]})"
        raise InvalidArgumentError(f"{name} is {got}; pass {allowed.__name__}(...).", field=name)


def _has_chunks(prompt: object) -> bool:
    return isinstance(prompt, (list, tuple)) and any(isinstance(piece, Chunk) for piece in prompt)


def _divided(prompt: Prompt) -> tuple[Any, dict[str, Any]]:
    """A prompt's content, and what a mapping says beside it. Raises: InvalidArgumentError."""
    if not isinstance(prompt, Mapping):
        return prompt, {}
    options = dict(prompt)
    contents = [name for name in ("prompt", "prompt_token_ids") if name in options]
    unknown = [name for name in options if name not in (*contents, *PROMPT_OPTIONS)]
    if len(contents) != 1 or unknown:
        raise InvalidArgumentError(
            f"a prompt has the keys {', '.join(map(repr, prompt)) or 'of nothing'}; pass one of 'prompt' or "
            f"'prompt_token_ids', and beside it only {', '.join(PROMPT_OPTIONS)}.",
            field="prompt",
        )
    [name] = contents
    content = options.pop(name)
    allowed = "token ids" if name == "prompt_token_ids" else "text, or a list of pieces with chunks"
    if not (isinstance(content, (list, tuple)) if name == "prompt_token_ids" else _is_prompt(content)):
        raise InvalidArgumentError(f"{name} is a {type(content).__name__}; pass {allowed}.", field="prompt")
    for option, kind in (
        ("chunk_reuse", ChunkReuse),
        ("sparse_prefill", str),
        ("conversation_snapshots", bool),
    ):
        if not isinstance(options.get(option), kind | None):
            raise InvalidArgumentError(
                f"{option} is {options[option]!r}; pass a {kind.__name__}, or leave it out.", field=option
            )
    return content, options


def _is_prompt(content: object) -> bool:
    return isinstance(content, str) or _has_chunks(content)
