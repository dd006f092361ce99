"""One structured line for each request, and what surrounds it."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
import web
from logged import Log, complete, post
from running import MODEL, Running, running_server
from steering import halted

from kvreclaim import LLM, demo_model
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.admin import logs
from kvreclaim.server.admin.logs import StructuredFormatter, configure_logging

MARKER = "xyzzymarker"
KEY = "key-of-a-tenant"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(LLM(demo_model(), num_blocks=128, max_num_seqs=8, max_model_len=256)) as running:
        yield running


def test_one_line_for_each_request(server: Running, log: Log) -> None:
    prompt = " ".join(["GO", "wind", "oak", "fern"] * 12)
    complete(server, prompt=prompt)
    answer = complete(server, prompt=prompt, user="user-7", ignore_eos=True)
    usage, line = answer.json()["usage"], log.access(answer.headers["x-request-id"])
    assert line | {"time": "", "duration_s": 0, "queue_s": 0, "ttft_s": 0} == {
        "time": "",
        "level": "info",
        "logger": "kvreclaim.access",
        "message": "POST /v1/completions 200",
        "request_id": answer.headers["x-request-id"],
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "duration_s": 0,
        "model": MODEL,
        "user": "user-7",
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "tokens_evicted": 0,
        "blocks_freed": 0,
        "preemptions": 0,
        "finish_reasons": ["length"],
        "queue_s": 0,
        "ttft_s": 0,
    }
    assert line["cached_tokens"] > 0
    assert line["duration_s"] > line["ttft_s"] > line["queue_s"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


def test_what_compression_did_is_in_the_line(server: Running, log: Log) -> None:
    policy = {"policy": "knorm", "budget": 32, "interval": 16, "recent": 8}
    prompt = " ".join(["GO", "wind", "oak", "fern"] * 25)
    answer = complete(server, prompt=prompt, max_tokens=60, ignore_eos=True, kv_compression=policy)
    line, usage = log.access(answer.headers["x-request-id"]), answer.json()["usage"]["kv_cache"]
    assert line["blocks_freed"] == usage["blocks_freed"] > 0
    assert line["tokens_evicted"] == usage["tokens_evicted"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_outputs_are_summed(server: Running, log: Log, stream: bool) -> None:
    answer = complete(server, prompt=["GO", "GO wind"], n=2, ignore_eos=True, max_tokens=3, stream=stream)
    line = log.access(answer.headers["x-request-id"])
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 12)
    assert line["finish_reasons"] == ["length"] * 4


def test_tenants_are_digests() -> None:
    llm = LLM(demo_model(), num_blocks=64, max_num_seqs=2, max_model_len=256)
    with Log.attached() as log, running_server(llm, api_keys=(KEY,)) as server:
        good = post(server, "/tokenize", {"model": MODEL, "prompt": "GO"}, headers={"x-api-key": KEY})
        bad = post(server, "/tokenize", {"model": MODEL, "prompt": "GO"}, headers={"x-api-key": "wrong-key"})
        assert (good.status_code, bad.status_code) == (200, 401)
        assert re.fullmatch(r"[0-9a-f]{16}", log.access(good.headers["x-request-id"])["tenant"])
        assert "tenant" not in log.access(bad.headers["x-request-id"])
    assert KEY not in log.text
    assert "wrong-key" not in log.text


def test_a_client_that_leaves_is_a_499(server: Running, log: Log) -> None:
    body = {"model": MODEL, "prompt": "GO", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with halted(server):
        with web.stream("POST", f"{server.base_url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        line = log.access(answer.headers["x-request-id"])
    assert line["status"] == 499
    assert line["finish_reasons"] == ["abort"]
    assert 1 <= line["completion_tokens"] < 200


def test_what_machines_ask_again_and_again_is_quiet(server: Running, log: Log) -> None:
    ids = [web.get(server.base_url + path).headers["x-request-id"] for path in logs.QUIET_ROUTES]
    assert [log.access(request_id)["level"] for request_id in ids] == ["debug"] * len(ids)


@pytest.mark.parametrize("style", ["json", "text"])
def test_a_record_cannot_forge_another(style: str) -> None:
    fields = {"user": 'a\n{"level":"info"} b="c"', "request_id": "req-1"}
    record = logging.LogRecord("kvreclaim.x", logging.INFO, __file__, 1, "GET %s", ("/a",), None)
    record.fields = fields
    text = StructuredFormatter(style, log_prompts=False).format(record)
    assert "\n" not in text
    if style == "text":
        assert text.endswith(
            r' kvreclaim.x: GET /a user="a\n{\"level\":\"info\"} b=\"c\"" request_id="req-1"'
        )


@pytest.fixture
def root() -> Iterator[None]:
    """Restores what configure_logging changes."""
    loggers = [logging.getLogger(name) for name in (None, "kvreclaim", "transformers")]
    saved = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, saved, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("root")
def test_levels_and_formats() -> None:
    stream = io.StringIO()
    configure_logging("json", "warning", log_prompts=False, stream=stream)
    logging.getLogger("kvreclaim.a").info("quiet")
    logging.getLogger("kvreclaim.a").warning("loud")
    logging.getLogger("transformers").setLevel(logging.WARNING)
    logging.getLogger("transformers.x").warning("theirs")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["loud", "theirs"]
    configure_logging("auto", "debug", log_prompts=False, stream=stream)
    logging.getLogger("kvreclaim.a").debug("now")
    logging.getLogger("httpx2").info(MARKER)
    assert json.loads(stream.getvalue().splitlines()[-1])["message"] == "now"
    assert MARKER not in stream.getvalue()
    configure_logging("text", "info", log_prompts=False, stream=stream)
    logging.getLogger("kvreclaim.a").info("plain")
    assert stream.getvalue().splitlines()[-1].endswith("INFO kvreclaim.a: plain")
    for log_format, level in (("xml", "info"), ("json", "loud")):
        with pytest.raises(InvalidArgumentError, match="must be one of"):
            configure_logging(log_format, level, log_prompts=False)
