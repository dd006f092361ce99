"""Prompts and settings as callers write them, and the requests made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvreclaim.chunks import Chunk, ChunkReuse, Chunks
from kvreclaim.engine.feature import take_options
from kvreclaim.engine.features import FEATURES
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.errors import InvalidArgumentError

Piece = Chunk | str | list[int]
Prompt = str | list[int] | Sequence[Piece] | Mapping[str, Any]
"""Text, token ids, a list of pieces with chunks ([Chunk(text), question]), or a mapping: text or pieces as
"prompt", or ids as "prompt_token_ids", and prompt_keys()."""


def prompt_keys() -> dict[str, type]:
    """Further keys of a mapping: cache_salt, and fields of the features' options, with their types."""
    return {"cache_salt": object} | {
        name: kind for feature in FEATURES for name, kind in feature.prompt_keys.items()
    }


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


def request_of(prompt: Prompt, encode: Encode, options: Iterable[object] = (), **fields: Any) -> RequestSpec:
    """The request for a prompt. options: further ones; fields: other fields of RequestSpec.

    Raises: InvalidArgumentError.
    """
    content, given = _divided(prompt)
    reuse = given.pop("chunk_reuse", None)
    found = take_options(FEATURES, given) | {type(each): each for each in options}
    if _has_chunks(content):
        tokens, chunks = laid_out(content, ChunkReuse() if reuse is None else reuse, encode)
        found[Chunks] = chunks
    elif reuse is not None:
        raise InvalidArgumentError(
            "chunk_reuse is given, but the prompt has no chunks; pass pieces such as [Chunk(text), question] "
            "or leave chunk_reuse out.",
            field="chunk_reuse",
        )
    else:
        tokens = encode(content, True) if isinstance(content, str) else list(content)
    text = content if isinstance(content, str) else None
    return RequestSpec(prompt_token_ids=tokens, prompt=text, options=found, **given, **fields)


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
    """Return a prompt's content, and the other keys of a mapping. Raises: InvalidArgumentError."""
    if not isinstance(prompt, Mapping):
        return prompt, {}
    options, keys = dict(prompt), prompt_keys()
    contents = [name for name in ("prompt", "prompt_token_ids") if name in options]
    unknown = [name for name in options if name not in (*contents, *keys)]
    if len(contents) != 1 or unknown:
        raise InvalidArgumentError(
            f"a prompt has the keys {', '.join(map(repr, prompt)) or 'of nothing'}; pass one of 'prompt' or "
            f"'prompt_token_ids', and beside it only {', '.join(keys)}.",
            field="prompt",
        )
    [name] = contents
    content = options.pop(name)
    allowed = "token ids" if name == "prompt_token_ids" else "text, or a list of pieces with chunks"
    if not (isinstance(content, (list, tuple)) if name == "prompt_token_ids" else _is_prompt(content)):
        raise InvalidArgumentError(f"{name} is a {type(content).__name__}; pass {allowed}.", field="prompt")
    for option, kind in keys.items():
        if not isinstance(options.get(option), kind | None):
            raise InvalidArgumentError(
                f"{option} is {options[option]!r}; pass a {kind.__name__}, or leave it out.", field=option
            )
    return content, options


def _is_prompt(content: object) -> bool:
    return isinstance(content, str) or _has_chunks(content)
