"""A server over a quantised cache: answers, prefix hits, metrics, and a request that it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import web
from exposition import Scrape
from running import MODEL, Running, openai_client, running_server

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
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "extra_body": extra}
        return client.completions.create(**asked)


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
