"""`llama-server`, llama.cpp's own, in a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.request import Request, urlopen

from kvreclaim.bench.systems.server_process import HOST, ServerProcess, free_port
from kvreclaim.errors import InvalidArgumentError

ANSWER_TIMEOUT_S = 600.0


class LlamaCppServer(ServerProcess):
    """A GGUF file under flash attention, with a slot and a stream for each sequence. No prompt caching.

    binary: made by `make llamacpp-env`; cache_type: of keys and values; max_len: tokens of a sequence
    """

    def __init__(
        self, binary: Path, model: Path, *, threads: int, cache_type: str, sequences: int, max_len: int
    ) -> None:
        if not binary.is_file():
            raise InvalidArgumentError(
                f"llama-server must be next to --llamacpp-python, and {str(binary)!r} is no file; run "
                "`make llamacpp-env`, or leave llamacpp out of --peers."
            )
        port = free_port()
        options = {
            "host": HOST,
            "port": port,
            "model": model,
            "threads": threads,
            "parallel": sequences,
            "ctx-size": -(-max_len // 256) * 256 * sequences,
            "cache-type-k": cache_type,
            "cache-type-v": cache_type,
            "flash-attn": "on",
            "cache-ram": 0,
        }
        command = [str(binary), "--no-kv-unified"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        super().__init__("llama-server", command, os.environ, port)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt up to an end token, which ignore_eos would make llama.cpp avoid."""
        options = {"n_predict": max_tokens, "temperature": 0, "return_tokens": True}
        answers = []
        for prompt in prompts:
            body = json.dumps(options | {"prompt": prompt, "cache_prompt": False}).encode()
            request = Request(f"{self.url}/completion", body, {"content-type": "application/json"})
            with urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
                answers.append([int(token) for token in json.load(answer)["tokens"]])
        return answers
