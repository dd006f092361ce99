"""Log-probabilities in the two shapes that OpenAI gives them, and in vLLM's for prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from kvreclaim.engine.core.outputs import Logprob
from kvreclaim.engine.face.exports import Tokenizer

LOWEST = -9999.0
"""Instead of -inf, for which JSON has no word."""
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Report = dict[int, Logprob]


class Vocabulary:
    """Single tokens as text and as bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._codes: dict[str, int] = {}
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """The token alone, special ones too; a part of a character is U+FFFD."""
        if (known := self._texts.get(token_id)) is not None:
            return known
        text = self._texts[token_id] = str(self.tokenizer.decode([token_id]))
        return text

    def bytes(self, token_id: int, text: str) -> list[int]:
        """Its bytes: parts of a character put together give the character."""
        if "�" not in text:
            return list(text.encode())
        piece = str(self.tokenizer.convert_ids_to_tokens(token_id))
        if found := BYTE_PIECE.fullmatch(piece):
            return [int(found[1], 16)]
        self._codes = codes = self._codes or byte_level_codes()
        known = all(character in codes for character in piece)
        return [codes[character] for character in piece] if known else list(text.encode())


def byte_level_codes() -> dict[str, int]:
    """The byte of each character of a byte-level BPE vocabulary: printable Latin-1 stands for itself, all
    others in order for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TextOffsets:
    """Where in the text each token begins, a token at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._length = 0

    def append(self, token_id: int) -> int:
        """Characters before this token."""
        before = self._length
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=True)  # as the engine's detokenizer does
            piece = self._stream.step(self._backend, token_id)
        self._length += len(piece or "")
        return before


def completion_logprobs(
    token_ids: Sequence[int],
    reports: Sequence[Report | None],
    vocabulary: Vocabulary,
    offsets: TextOffsets,
) -> dict[str, list[Any]]:
    """/v1/completions: four lists; a prompt's first token has no log-probability."""
    shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, report in zip(token_ids, reports, strict=True):
        shape["tokens"].append(vocabulary.text(token_id))
        shape["text_offset"].append(offsets.append(token_id))
        if report is None:
            shape["token_logprobs"].append(None)
            shape["top_logprobs"].append(None)
            continue
        top: dict[str, float] = {}
        for other, found in _by_rank(report):
            top.setdefault(vocabulary.text(other), _finite(found))
        shape["token_logprobs"].append(_finite(report[token_id]))
        shape["top_logprobs"].append(top)
    return shape


def chat_logprobs(
    token_ids: Sequence[int], reports: Iterable[Report], top: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """/v1/chat/completions: one object per token, with exactly `top` alternatives."""

    def entry(token_id: int, found: Logprob) -> dict[str, Any]:
        text = vocabulary.text(token_id)
        return {"token": text, "bytes": vocabulary.bytes(token_id, text), "logprob": _finite(found)}

    content = []
    for token_id, report in zip(token_ids, reports, strict=True):
        best = [entry(other, found) for other, found in _by_rank(report)[:top]]
        content.append({**entry(token_id, report[token_id]), "top_logprobs": best})
    return {"content": content}


def prompt_logprobs(
    reports: Iterable[Report | None], vocabulary: Vocabulary
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: per prompt token a mapping of token ids; None for the first one."""
    return [
        None
        if report is None
        else {
            str(token_id): {
                "logprob": _finite(found),
                "rank": found.rank,
                "decoded_token": vocabulary.text(token_id),
            }
            for token_id, found in _by_rank(report)
        }
        for report in reports
    ]


def _by_rank(report: Report) -> list[tuple[int, Logprob]]:
    return sorted(report.items(), key=lambda item: item[1].rank)


def _finite(found: Logprob) -> float:
    return max(found.logprob, LOWEST)
