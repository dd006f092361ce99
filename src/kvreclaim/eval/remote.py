"""Evaluates a server with OpenAI's API: the grid's tasks and verdicts, with answers of POST /v1/completions.

Prompts are sent as token ids, so that servers get the same ones as an engine of this process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http.client import HTTPException
from types import SimpleNamespace
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kvreclaim.checks import require
from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.plan import EvalPlan, GridColumn, TaskOptions
from kvreclaim.eval.requests import CellError
from kvreclaim.eval.results import SUMMED, Result
from kvreclaim.eval.task import Answer, Item, Task
from kvreclaim.eval.task_names import check_generated
from kvreclaim.eval.tasks import make_tasks
from kvreclaim.model.loader import Tokenizer

TIMEOUT_S = 3600.0
UNKNOWN: dict[str, Any] = dict.fromkeys(("full_blocks", "answer_blocks", "peak_blocks", *SUMMED), 0)
"""Figures that only an engine of this process has."""


class RemoteServer:
    """A server with OpenAI's API, and one model of it.

    url:   with or without /v1
    model: the name, or None for the server's only model

    Raises: InvalidArgumentError if the server does not answer, or lacks the model.
    """

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        require(
            self.url.startswith(("http://", "https://")),
            f"--url is {url!r}; pass a server's address, such as http://127.0.0.1:8000.",
        )
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        try:
            entries = {str(entry["id"]): entry for entry in self._call("models")["data"]}
        except CellError as error:
            raise InvalidArgumentError(str(error)) from None
        names = [model] if model in entries else list(entries)
        require(
            len(names) == 1,
            f"the server has {len(entries)} models: {', '.join(entries)}; name one of them by --model.",
        )
        self.model = names[0]
        self.root = str(entries[self.model].get("root") or self.model)
        self.max_model_len: int | None = entries[self.model].get("max_model_len")

    def complete(self, item: Item) -> tuple[Answer, int]:
        """Generate an answer. Returns: it, and its number of tokens. Raises: CellError."""
        body = {
            "model": self.model,
            "prompt": list(item.prompt),
            "max_tokens": item.max_new_tokens,
            "temperature": item.temperature,
        }
        reply = self._call("completions", body if item.seed is None else body | {"seed": item.seed})
        length = int(reply["usage"]["completion_tokens"])
        return Answer(text=reply["choices"][0]["text"], length=length), length

    def _call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}/v1/{path}", data, self._headers)
        try:
            with urlopen(request, timeout=TIMEOUT_S) as reply:
                return json.load(reply)
        except HTTPError as error:
            raise CellError(
                f"{self.url} refuses /v1/{path} with status {error.code}: {_message(error)}"
            ) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise CellError(
                f"{self.url} does not answer ({reason}); start the server, or correct --url."
            ) from None
        except ValueError:
            raise CellError(
                f"{self.url}/v1/{path} is no JSON; --url must be a server with OpenAI's API."
            ) from None


def _message(error: HTTPError) -> str:
    """The sentence in an error of OpenAI's API; the reason if there is none."""
    try:
        reply = json.load(error)
        return str(reply.get("error", reply)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return str(error.reason)


class RemoteRunner:
    """Runs items on a server, the requests of a batch at once."""

    storage = None

    def __init__(self, server: RemoteServer, plan: EvalPlan) -> None:
        self.server, self.plan = server, plan

    @property
    def identity(self) -> dict[str, Any]:
        """The part that all cells of a run share."""
        server = self.server
        return {"url": server.url, "model": server.model, "max_model_len": server.max_model_len}

    def batch_size(self, task: Task, items: Sequence[Item]) -> int:
        return self.plan.batch_size

    def run(self, task: Task, items: Sequence[Item], setting: GridColumn) -> list[Result]:
        """Judge every item. Raises: CellError if a request failed."""
        started = time.perf_counter()
        with ThreadPoolExecutor(len(items)) as pool:
            replies = list(pool.map(self.server.complete, items))
        elapsed_s = (time.perf_counter() - started) / len(items)
        return [
            Result(
                **asdict(task.judge(item, answer)),
                num_tokens=item.num_tokens,
                budget=item.num_tokens,
                timed_tokens=length,
                elapsed_s=elapsed_s,
                generated=True,
                **UNKNOWN,
            )
            for item, (answer, length) in zip(items, replies, strict=True)
        ]


def remote_tasks(
    names: Sequence[str], server: RemoteServer, tokenizer: Tokenizer | None, options: TaskOptions
) -> list[Task]:
    """Make the tasks of these names. tokenizer: of the server's model

    Raises: InvalidArgumentError for a task that needs an engine, or sequences beyond the server's context.
    """
    check_generated(names, options)
    require(
        tokenizer is not None,
        "the model has no tokenizer, and tasks are written in text; pass a model with one by --model.",
    )
    facts = SimpleNamespace(tokenizer=tokenizer, facts=SimpleNamespace(name=server.model))
    # Tasks with generated answers read a model's tokenizer and name alone.
    tasks = make_tasks(names, cast(LLM, SimpleNamespace(tokenizer=tokenizer, loaded=facts)), options)
    for task in tasks:
        item = task.item(0, 0)
        require(
            not item.continuation,
            f"task {task.name} of the demo model has a given answer, which no server scores; run it without "
            "--url, or pass --dialect text.",
        )
        most = server.max_model_len
        require(
            most is None or item.num_tokens <= most,
            f"a sequence of task {task.name} has up to {item.num_tokens} tokens, and the server's context "
            f"has {most}; lower --num-tokens, or start the server with more.",
        )
    return tasks
