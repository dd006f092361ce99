"""Log-probabilities in OpenAI's two formats, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvreclaim.engine.sampling.logprobs import Logprob
from kvreclaim.server.base.vocabulary import TokenPlaces

LOWEST = -9999.0
"""Replaces -inf, which JSON cannot express."""
Report = dict[int, Logprob]


def completion_logprobs(
    token_ids: Sequence[int], reports: Iterable[Report | None], places: TokenPlaces
) -> dict[str, list[Any]]:
    """/v1/completions: four lists; a prompt's first token has no log-probability. An alternative with the
    text of another one is keyed by its id."""
    shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, report in zip(token_ids, reports, strict=True):
        own, offset, first = places.append(token_id)
        shape["tokens"].append(own.text)
        shape["text_offset"].append(offset)
        if report is None:
            shape["token_logprobs"].append(None)
            shape["top_logprobs"].append(None)
            continue
        top: dict[str, float] = {}
        for other, found in _by_rank(report):
            text = places.vocabulary.spelling(other, first=first).text
            taken = other != token_id and (text == own.text or text in top)
            top[f"token_id:{other}" if taken else text] = _finite(found)
        shape["token_logprobs"].append(_finite(report[token_id]))
        shape["top_logprobs"].append(top)
    return shape


def chat_logprobs(
    token_ids: Sequence[int], reports: Iterable[Report], top: int, places: TokenPlaces
) -> dict[str, Any]:
    """/v1/chat/completions: one object per token, with exactly `top` alternatives."""

    def entry(token_id: int, found: Logprob, *, first: bool) -> dict[str, Any]:
        spelling = places.vocabulary.spelling(token_id, first=first)
        return {"token": spelling.text, "bytes": spelling.bytes, "logprob": _finite(found)}

    content = []
    for token_id, report in zip(token_ids, reports, strict=True):
        first = places.append(token_id).first
        best = [entry(other, found, first=first) for other, found in _by_rank(report)[:top]]
        content.append({**entry(token_id, report[token_id], first=first), "top_logprobs": best})
    return {"content": content}


def prompt_logprobs(
    token_ids: Sequence[int], reports: Iterable[Report | None], places: TokenPlaces
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: per prompt token a mapping of token ids; None for the first one."""

    def entry(token_id: int, found: Logprob, *, first: bool) -> dict[str, Any]:
        text = places.vocabulary.spelling(token_id, first=first).text
        return {"logprob": _finite(found), "rank": found.rank, "decoded_token": text}

    def line(report: Report, *, first: bool) -> dict[str, dict[str, Any]]:
        return {str(other): entry(other, found, first=first) for other, found in _by_rank(report)}

    firsts = [places.append(token_id).first for token_id in token_ids]
    return [
        None if report is None else line(report, first=first)
        for report, first in zip(reports, firsts, strict=True)
    ]


def _by_rank(report: Report) -> list[tuple[int, Logprob]]:
    return sorted(report.items(), key=lambda item: item[1].rank)


def _finite(found: Logprob) -> float:
    return max(found.logprob, LOWEST)
