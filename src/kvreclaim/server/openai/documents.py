"""Documents of a request: texts that other requests share at other positions of their prompts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from kvreclaim.chunks import Chunk, ChunkReuse, Chunks
from kvreclaim.engine.api.prompts import Piece, laid_out
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.options import settings_of
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import Fields, Listed, described, mirrors
from kvreclaim.server.shared.service import Service

MAX_DOCUMENTS = 1024


class Document(Fields):
    text: str = Field(min_length=1)
    title: str | None = Field(None, min_length=1)


Documents = Annotated[
    Listed[Annotated[str, Field(min_length=1)] | Document],
    Field(min_length=1, max_length=MAX_DOCUMENTS),
    described("texts, or objects with a text and maybe a title"),
]


@mirrors(ChunkReuse, settings_of(ChunkReuse))
class ChunkReuseFields(Fields):
    """ChunkReuse's fields."""


def texts_of(documents: Sequence[str | Document], service: Service) -> list[str]:
    """Return the documents' texts for the prompt, titles first. Raises: ApiError 400 if they cannot fit."""
    texts = []
    for each in documents:
        text = each if isinstance(each, str) else each.text
        title = f"{each.title}\n" if isinstance(each, Document) and each.title is not None else ""
        texts.append(f"{title}{text}\n\n")
    service.check_chars(sum(map(len, texts)), "documents")
    return texts


def num_chars(documents: Sequence[str | Document]) -> int:
    """Approximate number of characters to encode."""
    return sum(len(each if isinstance(each, str) else each.text) for each in documents)


def reuse_of(given: Any) -> ChunkReuse:
    """Raises: ApiError 400."""
    try:
        return ChunkReuse(**({} if given is None else given.model_dump(exclude_none=True)))
    except InvalidArgumentError as error:
        raise ApiError(400, str(error), "chunk_reuse") from error


def before_prompt(
    documents: Sequence[str | Document],
    prompt: str | list[int],
    how: ChunkReuse,
    service: Service,
    *,
    add_special_tokens: bool = True,
) -> tuple[list[int], Chunks]:
    """Put a prompt after its documents. Control tokens in documents stay text."""
    texts = texts_of(documents, service)
    pieces: list[Piece] = [
        Chunk(_plain(service, text, begins=add_special_tokens and not at)) for at, text in enumerate(texts)
    ]
    if isinstance(prompt, str):
        return laid_out([*pieces, service.encode(prompt, add_special_tokens=False)], how, _no_text)
    return laid_out([*pieces, prompt], how, _no_text)


def within_chat(
    documents: Sequence[str | Document], text: str, mark: str, how: ChunkReuse, service: Service
) -> tuple[list[int], Chunks]:
    """Return a conversation with the mark at the documents' position. Raises: ApiError 400."""
    around = text.split(mark)
    if len(around) != 2:
        raise ApiError(
            400,
            "this model's chat template does not leave the text of messages as it is, so documents have no "
            "place in it; write them into the message.",
            "documents",
        )
    assert service.plain is not None, "a model without tokenizer is refused"
    before, after = map(service.plain.encode, around)
    chunks = [Chunk(_plain(service, each)) for each in texts_of(documents, service)]
    return laid_out([before, *chunks, after], how, _no_text)


class DocumentPlaces:
    """Position of documents in a conversation: before the text of the last user message."""

    def __init__(self) -> None:
        self.mark = f"x{secrets.token_hex(12)}x"  # letters and digits: unchanged by template filters

    def marked(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Insert the mark. Raises: ApiError 400 if there is no user text."""
        last = max((at for at, each in enumerate(messages) if each["role"] == "user"), default=None)
        if last is None:
            raise ApiError(
                400,
                "documents stand before the text of a user's message, and there is none; add one.",
                "documents",
            )
        message = messages[last]
        return [
            *messages[:last],
            {**message, "content": f"{self.mark}{message['content']}"},
            *messages[last + 1 :],
        ]


def _plain(service: Service, text: str, *, begins: bool = False) -> list[int]:
    """begins: start of a prompt, where the tokenizer may add its own tokens"""
    plain, tokenizer = service.plain, service.tokenizer
    assert plain is not None, "a model without tokenizer is refused"
    ids = plain.encode(plain.guard(text))
    if not begins:
        return ids
    whole, bare = (list(tokenizer.encode("a", add_special_tokens=own)) for own in (True, False))
    num_own = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return [*whole[:num_own], *ids]


def _no_text(text: str, begins: bool) -> list[int]:
    raise AssertionError("all pieces are tokens")
