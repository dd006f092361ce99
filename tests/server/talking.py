"""A server with many settings, and a client that returns its answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tiny
import web
from running import MODEL, Running, running_server
from tokenizers.processors import TemplateProcessing

from kvreclaim import LLM

OTHER_NAME = "another-name"
PROMPT = "the end of the story, then the stop"
MESSAGES = [{"role": "user", "content": PROMPT}]
EOS = 262
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ tools | tojson if tools }}{{ mood }}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
GREEDY = {"temperature": 0.0, "max_tokens": 12}


def save_model(directory: Path) -> Path:
    """A model that can end by itself, whose tokenizer begins texts with a token of its own."""
    tiny.save_model("llama", directory, eos_token_id=EOS)
    tokenizer = tiny.tokenizer()
    assert tokenizer.eos_token_id == EOS
    begin = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.save_pretrained(directory)
    return directory


class Talker:
    """Send requests and return the answers."""

    def __init__(self, running: Running, oracle: LLM) -> None:
        self.running = running
        self.oracle = oracle

    def completion(self, **fields: Any) -> dict[str, Any]:
        return self.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, **fields})

    def chat(self, **fields: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, **fields})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = web.post(self.running.base_url + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, **fields: Any) -> str:
        return self.completion(**fields)["choices"][0]["text"]

    def refused(self, path: str = "/v1/completions", **fields: Any) -> str:
        default = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
        answer = web.post(self.running.base_url + path, json={"model": MODEL, **default, **fields})
        assert answer.status_code in (400, 404), answer.text
        return answer.json()["error"]["param"]

    def prompt(self, **fields: Any) -> str:
        """The prompt that the model of a chat reads."""
        ids = self.chat(return_token_ids=True, max_tokens=1, **fields)["prompt_token_ids"]
        return self.oracle.tokenizer.decode(ids)


@contextmanager
def talker(directory: Path) -> Iterator[Talker]:
    """A server of two names, four seats and priorities; the oracle is the same model without a server."""
    save_model(directory)
    llm = LLM(directory, num_blocks=256, max_num_seqs=4, scheduling_policy="priority")
    with running_server(llm, served_model_name=(MODEL, OTHER_NAME), chat_template=TEMPLATE) as running:
        yield Talker(running, LLM(directory, num_blocks=256))
