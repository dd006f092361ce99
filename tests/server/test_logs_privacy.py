"""No text of a user reaches the log, whatever fails."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import web
from logged import Log, complete, post
from running import MODEL, Running, running_server
from steering import LIMIT_S, read_at_once, until

from kvreclaim import LLM, demo_model
from kvreclaim.engine.sampling.detokenizer import Detokenizer
from kvreclaim.server.admin import logs
from kvreclaim.server.admin.logs import describe
from kvreclaim.server.shared.service import Service

MARKER = "xyzzymarker"
"""A word that the demo model does not know, so that it never stands in an answer."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(LLM(demo_model(), num_blocks=128, max_num_seqs=8, max_model_len=256)) as running:
        yield running


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
    logged = [line for line in log.lines if line.get("request_id") == request_id and "exception" in line]
    assert logged, log.text
    assert "ValueError" in logged[0]["exception"]
    assert "in quoting" in logged[0]["exception"]
    assert logs.WITHHELD in logged[0]["exception"]
    assert MARKER not in log.text
    monkeypatch.undo()
    assert complete(server).status_code == 200


def test_a_failure_in_mid_stream(server: Running, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, count = Detokenizer.append, []

    def sometimes(self: Detokenizer, token: int, **options: Any) -> Any:
        count.append(token)
        return whole(self, token, **options) if len(count) < 4 else quoting()

    monkeypatch.setattr(Detokenizer, "append", sometimes)
    with read_at_once(server):
        answer = complete(server, prompt=MARKER, stream=True, max_tokens=9, ignore_eos=True, temperature=0)
    assert answer.status_code == 200, answer.text
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
    described = "".join(describe(caught.value, log_prompts=False))
    assert "shapes cannot be multiplied" in described


def test_every_exception_of_a_chain_and_a_group_is_logged_without_its_text() -> None:
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
    described = "".join(describe(group, log_prompts=False))
    assert MARKER not in re.sub(r'File ".*\n.*\n', "", described), described
    for name in ("ValueError", "KeyError", "UnicodeDecodeError", "ExceptionGroup"):
        assert name in described
    assert described.index("ValueError") < described.index("KeyError")


def test_tasks_that_are_not_awaited(log: Log) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(logs.log_loop_error)
        task = asyncio.ensure_future(asyncio.to_thread(quoting))
        await asyncio.wait((task,))
        del task

    asyncio.run(main())
    [line] = [line for line in log.lines if line["logger"] == "asyncio" and line["level"] == "error"]
    assert "ValueError" in line["exception"]
    assert MARKER not in log.text


KVRECLAIM = Path(sys.executable).parent / "kvreclaim"


def test_every_line_is_an_object_and_none_quotes_a_prompt(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        small = ("--num-blocks", "64", "--max-model-len", "256")
        command = [KVRECLAIM, "serve", "--model", "demo", "--port", "0", *small]
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        until(lambda: "at http://" in err.read_text() or process.poll() is not None)
        url = re.search(r"at (http://[\d.:]+)", err.read_text())[1]
        for path, body in (
            ("/v1/completions", {"model": "kvreclaim-demo", "prompt": MARKER, "max_tokens": 2}),
            ("/v1/completions", {"model": "kvreclaim-demo", "prompt": {"a": MARKER}}),
            ("/v1/messages", {"model": "kvreclaim-demo", "messages": MARKER, "max_tokens": 2}),
        ):
            web.post(url + path, json=body)
        until(lambda: err.read_text().count("kvreclaim.access") == 3)
        lines = [json.loads(line) for line in err.read_text().splitlines()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
    assert [line["status"] for line in lines if line["logger"] == "kvreclaim.access"] == [200, 400, 400]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert MARKER not in err.read_text()
    assert not out.read_text()
