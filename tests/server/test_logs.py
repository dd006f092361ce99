"""The log tells what happened to every request, and nothing of what its user wrote."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import torch
from running import MODEL, Running, running_server
from steering import until

from kvreclaim import LLM, demo_model
from kvreclaim.engine.detokenizer import Detokenizer
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server import logs
from kvreclaim.server.logs import StructuredFormatter, configure_logging, describe
from kvreclaim.server.service import Service

MARKER = "xyzzymarker"
"""A word that the demo model does not know, so that it never stands in an answer."""
KEY = "key-of-a-tenant"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(LLM(demo_model(), num_blocks=128, max_num_seqs=8, max_model_len=256)) as running:
        yield running


@pytest.fixture
def log() -> Iterator[Log]:
    with Log.attached(log_prompts=False) as log:
        yield log


class Log:
    """Everything that is logged, as the server's formatter writes it, from DEBUG on and by everybody."""

    def __init__(self, *, log_prompts: bool) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(StructuredFormatter("json", log_prompts=log_prompts))

    @classmethod
    def attached(cls, *, log_prompts: bool) -> Any:
        return _Attached(cls(log_prompts=log_prompts))

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    def access(self, request_id: str) -> dict[str, Any]:
        """The access line of a request; it is written when the answer has been sent."""

        def mine() -> list[dict[str, Any]]:
            return [
                line
                for line in self.lines
                if line["logger"] == "kvreclaim.access" and line["request_id"] == request_id
            ]

        until(mine)
        assert len(mine()) == 1
        return mine()[0]


class _Attached:
    def __init__(self, log: Log) -> None:
        self.log = log

    def __enter__(self) -> Log:
        self.loggers = [logging.getLogger(), logging.getLogger("kvreclaim")]
        self.levels = [logger.level for logger in self.loggers]
        for logger in self.loggers:
            logger.setLevel(logging.DEBUG)
        self.loggers[0].addHandler(self.log.handler)
        return self.log

    def __exit__(self, *_: object) -> None:
        self.loggers[0].removeHandler(self.log.handler)
        for logger, level in zip(self.loggers, self.levels, strict=True):
            logger.setLevel(level)


def post(server: Running, path: str, body: Any, **options: Any) -> httpx2.Response:
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return httpx2.post(server.base_url + path, content=content, headers=headers, timeout=60, **options)


def complete(server: Running, **fields: Any) -> httpx2.Response:
    return post(server, "/v1/completions", {"model": MODEL, "prompt": "GO wind", "max_tokens": 4, **fields})


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
    line, told = log.access(answer.headers["x-request-id"]), answer.json()["usage"]["kv_cache"]
    assert line["blocks_freed"] == told["blocks_freed"] > 0
    assert line["tokens_evicted"] == told["tokens_evicted"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_outputs_are_summed(server: Running, log: Log, stream: bool) -> None:
    answer = complete(server, prompt=["GO", "GO wind"], n=2, ignore_eos=True, max_tokens=3, stream=stream)
    line = log.access(answer.headers["x-request-id"])
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 12)
    assert line["finish_reasons"] == ["length"] * 4


def test_tenants_are_digests() -> None:
    llm = LLM(demo_model(), num_blocks=64, max_num_seqs=2, max_model_len=256)
    with Log.attached(log_prompts=False) as log, running_server(llm, api_keys=(KEY,)) as server:
        good = post(server, "/tokenize", {"model": MODEL, "prompt": "GO"}, headers={"x-api-key": KEY})
        bad = post(server, "/tokenize", {"model": MODEL, "prompt": "GO"}, headers={"x-api-key": "wrong-key"})
        assert (good.status_code, bad.status_code) == (200, 401)
        assert re.fullmatch(r"[0-9a-f]{16}", log.access(good.headers["x-request-id"])["tenant"])
        assert "tenant" not in log.access(bad.headers["x-request-id"])
    assert KEY not in log.text
    assert "wrong-key" not in log.text


def test_a_client_that_leaves_is_a_499(server: Running, log: Log) -> None:
    body = {"model": MODEL, "prompt": "GO", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{server.base_url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    line = log.access(answer.headers["x-request-id"])
    assert line["status"] == 499
    assert line["finish_reasons"] == ["abort"]
    assert 1 <= line["completion_tokens"] < 200


def test_what_machines_ask_again_and_again_is_quiet(server: Running, log: Log) -> None:
    ids = [httpx2.get(server.base_url + path).headers["x-request-id"] for path in logs.QUIET_ROUTES]
    assert [log.access(request_id)["level"] for request_id in ids] == ["debug"] * len(ids)


CHAT = "/v1/chat/completions"
REFUSED = {
    "a wrong type": ("/v1/completions", {"model": MODEL, "prompt": {"text": MARKER}}),
    "an unknown field": ("/v1/completions", {"model": MODEL, "prompt": MARKER, MARKER: MARKER}),
    "a number that is text": ("/v1/completions", {"model": MODEL, "prompt": "GO", "max_tokens": MARKER}),
    "no JSON": ("/v1/completions", f'{{"model": "{MODEL}", "prompt": "{MARKER}'),
    "no UTF-8": ("/v1/completions", b'{"prompt": "' + MARKER.encode() + b'\xff"}'),
    "another model": ("/v1/completions", {"model": MARKER, "prompt": MARKER}),
    "too long": ("/v1/completions", {"model": MODEL, "prompt": f"{MARKER} " * 400}),
    "a wrong role": (CHAT, {"model": MODEL, "messages": [{"role": MARKER, "content": MARKER}]}),
    "a wrong part": (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": [{"type": MARKER}]}]}),
    "a wrong block": (
        "/v1/messages",
        {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": [{"type": MARKER}]}]},
    ),
    "a lone surrogate": ("/v1/completions", f'{{"model": "{MODEL}", "prompt": "{MARKER} \\ud800"}}'),
}


@pytest.mark.parametrize(("path", "body"), REFUSED.values(), ids=REFUSED.keys())
def test_no_prompt_text_of_a_refused_request(server: Running, log: Log, path: str, body: Any) -> None:
    answer = post(server, path, body)
    assert 400 <= answer.status_code < 500, answer.text
    assert log.access(answer.headers["x-request-id"])["status"] == answer.status_code
    assert MARKER not in log.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": f"GO {MARKER}", "max_tokens": 2, "stop": [MARKER]}),
        (CHAT, {"messages": [{"role": "user", "content": MARKER}], "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": MARKER}], "max_tokens": 2}),
        ("/tokenize", {"prompt": MARKER}),
    ],
)
def test_no_prompt_text_of_a_request_that_is_served(
    server: Running, log: Log, path: str, body: dict[str, Any]
) -> None:
    answer = post(server, path, {"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    log.access(answer.headers["x-request-id"])
    assert MARKER not in log.text


def quoting(*_: Any, **__: Any) -> Any:
    raise ValueError(f"cannot handle {MARKER}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("where", "name"), [(Service, "encode"), (Detokenizer, "append"), (Service, "check_model")]
)
def test_a_failure_is_logged_under_the_id_of_the_answer_without_its_message(
    server: Running, log: Log, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, stream: bool
) -> None:
    """In a route, in the engine's thread, before the first byte of a stream."""
    monkeypatch.setattr(where, name, quoting)
    answer = complete(server, prompt=MARKER, stream=stream)
    assert answer.status_code == 500, answer.text
    request_id = re.search(r"req-[0-9a-f]{32}", answer.json()["error"]["message"])[0]
    assert request_id == answer.headers["x-request-id"]
    log.access(request_id)
    told = [line for line in log.lines if line.get("request_id") == request_id and "exception" in line]
    assert told, log.text
    assert "ValueError" in told[0]["exception"]
    assert "in quoting" in told[0]["exception"]
    assert logs.WITHHELD in told[0]["exception"]
    assert MARKER not in log.text
    monkeypatch.undo()
    assert complete(server).status_code == 200


def test_a_failure_in_mid_stream(server: Running, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, count = Detokenizer.append, []

    def sometimes(self: Detokenizer, token: int, **options: Any) -> Any:
        count.append(token)
        return whole(self, token, **options) if len(count) < 4 else quoting()

    monkeypatch.setattr(Detokenizer, "append", sometimes)
    answer = complete(server, prompt=MARKER, stream=True, max_tokens=9, ignore_eos=True)
    assert answer.status_code == 200
    request_id = answer.headers["x-request-id"]
    assert request_id in answer.text
    assert log.access(request_id)["finish_reasons"] == ["error"]
    assert any(line.get("request_id") == request_id and "exception" in line for line in log.lines)
    assert MARKER not in log.text
    assert MARKER not in answer.text


def test_prompts_are_logged_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(demo_model(), num_blocks=64, max_num_seqs=2, max_model_len=256)
    with Log.attached(log_prompts=True) as log, running_server(llm, log_prompts=True) as server:
        answer = complete(server, prompt=["GO wind", "GO oak"], temperature=0)
        line = log.access(answer.headers["x-request-id"])
        assert line["prompts"] == ["GO wind", "GO oak"]
        assert line["answers"] == [choice["text"] for choice in answer.json()["choices"]]
        monkeypatch.setattr(Service, "encode", quoting)
        request_id = complete(server, prompt=MARKER).headers["x-request-id"]
        log.access(request_id)
        assert f"cannot handle {MARKER}" in log.text


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_messages_of_code_that_sees_no_text_are_kept() -> None:
    try:
        torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(5, 7))
    except RuntimeError as error:
        ours = "".join(describe(error, log_prompts=False))
    assert logs.WITHHELD in ours, "the innermost Python frame is this test"
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(7, 5)(torch.zeros(2, 3))
    told = "".join(describe(caught.value, log_prompts=False))
    assert "shapes cannot be multiplied" in told


def test_every_exception_of_a_chain_and_a_group_is_told_without_its_text() -> None:
    try:
        try:
            quoting()
        except ValueError as error:
            raise KeyError(MARKER) from error
    except KeyError as caught:
        chain = caught
    group = raised(
        ExceptionGroup(MARKER, [chain, raised(UnicodeDecodeError("utf8", MARKER.encode(), 0, 1, "x"))])
    )
    told = "".join(describe(group, log_prompts=False))
    assert MARKER not in re.sub(r'File ".*\n.*\n', "", told), told
    for name in ("ValueError", "KeyError", "UnicodeDecodeError", "ExceptionGroup"):
        assert name in told
    assert told.index("ValueError") < told.index("KeyError")


def test_tasks_that_nobody_awaits(log: Log) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(logs.log_loop_error)
        task = asyncio.ensure_future(asyncio.to_thread(quoting))
        await asyncio.wait((task,))
        del task

    asyncio.run(main())
    [line] = [line for line in log.lines if line["logger"] == "asyncio" and line["level"] == "error"]
    assert "ValueError" in line["exception"]
    assert MARKER not in log.text


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
