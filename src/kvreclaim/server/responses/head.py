"""Fields of a response next to its output: the request's settings, with defaults, and usage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.server.base.fields import reasoning_tokens, usage_of
from kvreclaim.server.responses.fields import ResponsesRequest

SHUT_DOWN = "the server shut down before the answer was complete; send the request again."


def head(response_id: str, body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """Return the response before its first output."""
    choice, reasoning, text = body.tool_choice, body.reasoning, body.text
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        **outcome_of(None),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.kept,
        "temperature": params.temperature,
        "text": {"format": (text and text.format) or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": choice.model_dump() if choice and not isinstance(choice, str) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def outcome_of(finish_reason: str | None) -> dict[str, Any]:
    """Status and its reason, by chat's finish reason; None: still running."""
    outcome: dict[str, Any] = {"status": "in_progress"}
    outcome |= {"completed_at": None, "error": None, "incomplete_details": None}
    match finish_reason:
        case "stop" | "tool_calls":
            outcome |= {"status": "completed", "completed_at": int(time.time())}
        case "length":
            outcome |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        case "abort":
            outcome |= failure(SHUT_DOWN)
    return outcome


def failure(message: str, code: str = "server_error") -> dict[str, Any]:
    return {"status": "failed", "error": {"code": code, "message": message}}


def response_usage(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Return chat's usage under this API's names.

    cache_write_tokens: prompt tokens that entered the prefix cache
    """
    usage = usage_of(metrics)
    written = sum(m.num_indexed_tokens - m.num_cached_tokens - m.num_repeated_tokens for m in metrics)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            **usage["prompt_tokens_details"],
            "cache_write_tokens": max(0, written),
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens(metrics) or 0},
        "total_tokens": usage["total_tokens"],
        "kv_cache": usage["kv_cache"],
    }
