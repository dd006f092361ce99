"""A server over a quantised cache: answers, prefix hits, metrics, and a request that it refuses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import web
from exposition import Scrape
from running import MODEL, Running, openai_client, running_server
from serve_command import served
from steering import LIMIT_S

from kvreclaim import LLM, SamplingParams, demo_model
from kvreclaim.eval.chain import ChainTask

PROMPT = list(ChainTask(num_prompt_tokens=300, num_trace_tokens=120).sample(4).prompt)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(LLM(demo_model(), num_blocks=128, max_num_seqs=4, kv_cache_dtype="int8")) as running:
        yield running


def complete(server: Running, **compression: object) -> openai.types.Completion:
    with openai_client(server) as client:
        extra = {"kv_compression": compression} if compression else {}
        request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "extra_body": extra}
        return client.completions.create(**request)


def test_answers_are_those_of_the_whole_precision(server):
    wanted = LLM(demo_model(), num_blocks=64, max_num_seqs=1)
    text = complete(server).choices[0].text
    again = complete(server)
    assert again.choices[0].text == text
    assert again.usage.prompt_tokens_details.cached_tokens == (len(PROMPT) - 1) // 16 * 16
    (out,) = wanted.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=60))
    assert text == out.outputs[0].text


def test_a_compressed_request_frees_blocks(server):
    usage = complete(server, policy="query_mixture", budget=128, interval=32, recent=32).usage
    assert usage.kv_cache["blocks_freed"] > 0


def test_metrics_name_the_format(server):
    scrape = Scrape.of(web.get(f"{server.base_url}/metrics").text)
    [(labels, value)] = scrape.rows("vllm:cache_config_info")
    assert (labels["cache_dtype"], labels["kv_cache_dtype"], value) == ("int8", "int8", 1)


def test_a_policy_that_the_format_excludes_is_a_400(server):
    with pytest.raises(openai.BadRequestError, match="would round them anew"):
        complete(server, policy="streaming_llm(positions=cache)", budget=256)


DOCUMENT = " ".join(f"k{i % 9 + 1} v{i % 7 + 1}" for i in range(100))
REQUEST = {"model": MODEL, "prompt": DOCUMENT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def options(tmp_path: Path) -> list[str]:
    size = ["--kv-offloading-size", "0.02", "--kv-offloading-disk-size", "0.02"]
    where = ["--kv-offloading-disk-path", str(tmp_path / "blocks")]
    return [*size, *where, "--kv-load-policy", "wait_complete"]


@pytest.mark.parametrize("engine", ["--engine-process", "--no-engine-process"])
def test_a_second_server_finds_what_the_first_one_computed(engine: str, tmp_path: Path) -> None:
    """SIGTERM comes right behind the answer, while its blocks are on their way to disk."""
    answers = []
    for _ in range(2):
        with served(tmp_path, *options(tmp_path), engine) as server:
            answers.append(web.post(f"{server.base_url}/v1/completions", json=REQUEST).json())
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(LIMIT_S) == 0, server.log.read_text()
    first, second = answers
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    num_prompt = second["usage"]["prompt_tokens"]
    assert num_prompt > 64
    full = (num_prompt - 1) // 16 * 16
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == full
