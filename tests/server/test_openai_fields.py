"""Every field that is accepted has an effect; the tables here hold all fields there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tiny
from running import MODEL, Running, running_server
from steering import Asking, paused, until
from tokenizers.processors import TemplateProcessing

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.server.openai.chat import ChatRequest
from kvreclaim.server.openai.completions import CompletionRequest

OTHER_NAME = "another-name"
PROMPT = "the end of the story, then the stop"
SAID = [{"role": "user", "content": PROMPT}]
EOS = 262
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ tools | tojson if tools }}{{ mood }}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
GREEDY = {"temperature": 0.0, "max_tokens": 12}
SEEDED = {"seed": 11, "max_tokens": 12}
COMPRESSION = {"policy": "knorm", "budget": 32, "interval": 8, "sinks": 2, "recent": 8}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can end by itself, whose tokenizer begins texts with a token of its own."""
    directory = tiny.save_model("llama", tmp_path_factory.mktemp("ends"), eos_token_id=EOS)
    tokenizer = tiny.tokenizer()
    assert tokenizer.eos_token_id == EOS
    begin = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> LLM:
    return LLM(model_dir, num_blocks=256)


class Server:
    """Asks, and says what came."""

    def __init__(self, running: Running, oracle: LLM) -> None:
        self.running = running
        self.oracle = oracle

    def completion(self, **fields: Any) -> dict[str, Any]:
        return self.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, **fields})

    def chat(self, **fields: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": SAID, **fields})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx2.post(self.running.base_url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, **fields: Any) -> str:
        return self.completion(**fields)["choices"][0]["text"]

    def refused(self, path: str = "/v1/completions", **fields: Any) -> str:
        ask = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": SAID}
        answer = httpx2.post(self.running.base_url + path, json={"model": MODEL, **ask, **fields})
        assert answer.status_code in (400, 404), answer.text
        return answer.json()["error"]["param"]

    def prompt(self, **fields: Any) -> str:
        """What a chat's model got to read."""
        ids = self.chat(return_token_ids=True, max_tokens=1, **fields)["prompt_token_ids"]
        return self.oracle.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def server(model_dir: Path, oracle: LLM) -> Iterator[Server]:
    llm = LLM(model_dir, num_blocks=256, max_num_seqs=4, scheduling_policy="priority")
    with running_server(llm, served_model_name=(MODEL, OTHER_NAME), chat_template=TEMPLATE) as running:
        yield Server(running, oracle)


SAMPLING: dict[str, tuple[dict[str, Any], Any, Any]] = {
    # field: (the other fields, the value that is set, the engine's value where it has another form)
    "max_tokens": ({"temperature": 0.0, "max_tokens": 12}, 5, 5),
    "temperature": (SEEDED, 0.0, 0.0),
    "top_p": (SEEDED, 0.05, 0.05),
    "top_k": (SEEDED, 1, 1),
    "min_p": (SEEDED, 1.0, 1.0),
    "seed": (SEEDED, 12, 12),
    "repetition_penalty": (GREEDY, 50.0, 50.0),
    "presence_penalty": (GREEDY | {"max_tokens": 60}, 2.0, 2.0),
    "frequency_penalty": (GREEDY | {"max_tokens": 60}, 2.0, 2.0),
    "logit_bias": (GREEDY, {"65": 100}, {65: 100}),
    "stop": (GREEDY | {"logit_bias": {"65": 100}}, ["bb"], ["bb"]),
    "stop_token_ids": (GREEDY | {"logit_bias": {"65": 100}}, [65], [65]),
    "ignore_eos": (GREEDY | {"logit_bias": {str(EOS): 100}}, True, True),
    "min_tokens": (GREEDY | {"logit_bias": {str(EOS): 100}}, 3, 3),
    "n": (SEEDED, 3, 3),
}


@pytest.mark.parametrize("field", SAMPLING)
def test_how_tokens_are_drawn(server: Server, field: str):
    """With the field the answer is another one, and the one that the engine gives."""
    base, value, engine_value = SAMPLING[field]

    def expected(**fields: Any) -> list[tuple[str, str]]:
        bias = {int(token): bias for token, bias in fields.pop("logit_bias", {}).items()}
        params = SamplingParams(**fields, logit_bias=bias or None)
        outputs = server.oracle.generate(PROMPT, params)[0].outputs
        return [(output.text, output.finish_reason) for output in outputs]

    def answered(**fields: Any) -> list[tuple[str, str]]:
        return [(c["text"], c["finish_reason"]) for c in server.completion(**fields)["choices"]]

    without, given = answered(**base), answered(**{**base, field: value})
    assert given != without
    assert without == expected(**base)
    assert given == expected(**{**base, field: engine_value})


def check_model(server: Server) -> None:
    assert server.completion(model=OTHER_NAME)["model"] == OTHER_NAME
    assert server.refused(model="zoo") == "model"


def check_prompt(server: Server) -> None:
    assert server.text(**GREEDY) != server.text(prompt="then", **GREEDY)


def check_messages(server: Server) -> None:
    assert server.prompt() == f"user:{PROMPT};assistant:"


def check_stream(server: Server) -> None:
    body = {"model": MODEL, "prompt": PROMPT, **GREEDY}
    streamed = httpx2.post(f"{server.running.base_url}/v1/completions", json={**body, "stream": True})
    assert streamed.text.startswith("data: ")
    assert "choices" in server.completion(**GREEDY, stream=False)


def check_stream_options(server: Server) -> None:
    body = {"model": MODEL, "prompt": PROMPT, **GREEDY, "stream": True}
    address = f"{server.running.base_url}/v1/completions"
    options = {"include_usage": True}
    assert "usage" not in httpx2.post(address, json=body).text
    assert '"usage":null' in httpx2.post(address, json={**body, "stream_options": options}).text
    options["continuous_usage_stats"] = True
    assert '"usage":null' not in httpx2.post(address, json={**body, "stream_options": options}).text


def check_echo(server: Server) -> None:
    assert server.text(**GREEDY, echo=True) == PROMPT + server.text(**GREEDY)


def check_completion_logprobs(server: Server) -> None:
    assert server.completion(**GREEDY)["choices"][0]["logprobs"] is None
    for top in (1, 3):
        found = server.completion(**GREEDY, logprobs=top)["choices"][0]["logprobs"]["top_logprobs"]
        assert max(map(len, found)) == top, "fewer only where two tokens look alike"


def check_chat_logprobs(server: Server) -> None:
    assert server.chat(**GREEDY)["choices"][0]["logprobs"] is None
    assert len(server.chat(**GREEDY, logprobs=True)["choices"][0]["logprobs"]["content"]) == 12


def check_top_logprobs(server: Server) -> None:
    for top in (0, 3):
        answer = server.chat(**GREEDY, logprobs=True, top_logprobs=top)
        assert {len(e["top_logprobs"]) for e in answer["choices"][0]["logprobs"]["content"]} == {top}


def check_prompt_logprobs(server: Server) -> None:
    assert "prompt_logprobs" not in server.completion(**GREEDY)["choices"][0]
    assert server.completion(**GREEDY, prompt_logprobs=1)["choices"][0]["prompt_logprobs"][0] is None


def check_return_token_ids(server: Server) -> None:
    expected = server.oracle.generate(PROMPT, SamplingParams(**GREEDY))[0].outputs[0].token_ids
    assert "token_ids" not in server.completion(**GREEDY)["choices"][0]
    assert server.completion(**GREEDY, return_token_ids=True)["choices"][0]["token_ids"] == expected


def check_add_special_tokens(server: Server) -> None:
    counts = [
        server.completion(**GREEDY, **more)["usage"]["prompt_tokens"]
        for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
    ]
    assert counts == [counts[0], counts[0], counts[0] - 1]


def check_max_completion_tokens(server: Server) -> None:
    assert server.chat(max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def check_tools(server: Server) -> None:
    assert '"name": "weather"' in server.prompt(tools=TOOLS)


def check_tool_choice(server: Server) -> None:
    assert "weather" not in server.prompt(tools=TOOLS, tool_choice="none")
    assert "weather" in server.prompt(tools=TOOLS, tool_choice="auto")


def check_add_generation_prompt(server: Server) -> None:
    assert server.prompt(add_generation_prompt=False) == f"user:{PROMPT};"


def check_continue_final_message(server: Server) -> None:
    assert server.prompt(continue_final_message=True) == f"user:{PROMPT}"


def check_chat_template_kwargs(server: Server) -> None:
    assert server.prompt(chat_template_kwargs={"mood": "dark"}) == f"user:{PROMPT};darkassistant:"


def check_response_format(server: Server) -> None:
    """It promises what every answer is, so that only the refusal of all other promises can be seen."""
    assert server.chat(**GREEDY, response_format={"type": "text"})["choices"]
    path = "/v1/chat/completions"
    assert server.refused(path, response_format={"type": "json_schema"}) == "response_format.type"


def cached(server: Server, **fields: Any) -> int:
    prompt = list(range(40, 80))
    usage = server.completion(prompt=prompt, max_tokens=1, **fields)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def check_cache_salt(server: Server) -> None:
    salts = ["a", "b", "a", "b"]
    assert [cached(server, cache_salt=salt) for salt in salts] == [0, 0, 32, 32]


def kept_s(server: Server, **fields: Any) -> int | None:
    """For how many seconds the blocks of a new prompt are kept; None: as long as those of any other."""
    pins, now = server.running.llm.engine.memory.pool.pins, 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pins, "_clock", lambda: now)
        pins.clear()
        server.completion(prompt=list(range(100, 140)), max_tokens=1, **fields)
        held = len(pins)
        assert held in (0, 40 // 16)
        for now in (300, 86_400):
            if not held:
                return None
            now -= 1
            pins.expire()
            assert len(pins) == held
            now += 1
            pins.expire()
            if not pins:
                return now
    raise AssertionError("kept for longer than anybody asked")


def check_prompt_cache_key(server: Server) -> None:
    assert kept_s(server) is None
    assert kept_s(server, prompt_cache_key="chapter one") == 300


def check_prompt_cache_retention(server: Server) -> None:
    assert kept_s(server, prompt_cache_retention="in_memory") == 300
    assert kept_s(server, prompt_cache_retention="in-memory") == 300
    assert kept_s(server, prompt_cache_retention="24h") == 86_400
    assert kept_s(server, prompt_cache_retention="24h", prompt_cache_key="chapter one") == 86_400


def check_user(server: Server, field: str = "user") -> None:
    lines: list[dict[str, Any]] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(getattr(record, "fields", {}))

    logger, handler = logging.getLogger("kvreclaim.access"), Catch()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        server.completion(**GREEDY, **{field: "somebody"})
        until(lambda: lines)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert lines[0]["user"] == "somebody"


def check_safety_identifier(server: Server) -> None:
    check_user(server, "safety_identifier")


class Order:
    """Notes the order in which requests end."""

    def __init__(self) -> None:
        self.priorities: list[int] = []

    def added(self, *_: object) -> None: ...

    def stepped(self, *_: object) -> None: ...

    def ended(self, _: object, request: Any) -> None:
        self.priorities.append(request.priority)


def check_priority(server: Server) -> None:
    """Eight requests for four seats: the ones with the lower numbers go first, whenever they came."""
    engine, order = server.running.service.engine, Order()
    observers = engine.observers
    engine.observers = (*observers, order)
    try:
        with paused(server.running):
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
            priorities = [5, 5, 5, 5, -1, -1, -1, -1]
            asked = []
            for number, priority in enumerate(priorities):
                asked.append(Asking(server.running, "/v1/completions", {**body, "priority": priority}))
                until(lambda number=number: engine.num_queued == number + 1)
        assert {asking.answer().status_code for asking in asked} == {200}
    finally:
        engine.observers = observers
    assert order.priorities == sorted(priorities)


def check_kv_compression(server: Server) -> None:
    prompt = [40 + i % 90 for i in range(120)]
    expected = server.oracle.generate([prompt], SamplingParams(**GREEDY), CompressionConfig(**COMPRESSION))[0]
    given = server.completion(prompt=prompt, **GREEDY, kv_compression=COMPRESSION)
    assert given["choices"][0]["text"] == expected.outputs[0].text
    assert given["usage"]["kv_cache"]["blocks_freed"] == expected.metrics.blocks_freed > 0
    assert server.completion(prompt=prompt, **GREEDY)["usage"]["kv_cache"]["blocks_freed"] == 0


CHECKS: dict[str, Callable[[Server], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def test_no_field_is_missing_here():
    named = {*CHECKS, *SAMPLING} - {"completion_logprobs", "chat_logprobs"} | {"logprobs"}
    assert named == {*CompletionRequest.model_fields, *ChatRequest.model_fields}


@pytest.mark.parametrize("field", CHECKS)
def test_what_a_field_does(server: Server, field: str):
    CHECKS[field](server)
