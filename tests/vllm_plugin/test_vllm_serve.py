"""`vllm serve` with compression, as OpenAI's own client sees it; the examples; a clean end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from models import random_prompts
from oracle import full_logprobs
from serving import STOP_LIMIT_S, Served, serving

EXAMPLES = Path(__file__).parents[2] / "examples" / "vllm"
BLOCK, BUDGET, INTERVAL, BLOCKS = 32, 192, 64, 40
PROMPT = random_prompts((500,), seed=5)[0]
SALTS = count()


@pytest.fixture(scope="module")
def server(tiny_model, tiny_stats, tmp_path_factory) -> Iterator[Served]:
    compression = {"policy": "query_mixture", "budget": BUDGET, "interval": INTERVAL, "recent": 32}
    limits = ("--block-size", "32", "--num-gpu-blocks-override", str(BLOCKS + 1), "--max-model-len", "1536")
    limits += ("--max-num-batched-tokens", "256", "--max-num-seqs", "8")
    folder = tmp_path_factory.mktemp("server")
    with serving(tiny_model, folder, {**compression, "stats": str(tiny_stats)}, *limits) as served:
        yield served


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def fields(settings: Any = None) -> dict[str, Any]:
    """vLLM's own fields of a request: settings of ours, and a salt that no other request has, so that no
    prefix hit moves the points at which prompts are compressed."""
    more: dict[str, Any] = {"cache_salt": f"s{next(SALTS)}", "return_token_ids": True}
    return more if settings is None else more | {"vllm_xargs": {"kv_compression": settings}}


def complete(client: openai.OpenAI, settings: Any = None, **more: Any) -> Any:
    given = {"model": "tiny", "prompt": PROMPT, "max_tokens": 150, "temperature": 0, "logprobs": 0, **more}
    return client.completions.create(**given, extra_body=fields(settings) | {"ignore_eos": True})


def figures(answer: Any) -> dict[str, int]:
    return (answer.model_extra.get("kv_transfer_params") or {}).get("kvreclaim", {})


def distance_to_full(model: Path, answer: Any) -> float:
    """Mean difference of the answer's log-probabilities to those over the full context."""
    choice = answer.choices[0]
    found = torch.tensor(choice.logprobs.token_logprobs)
    return float((found - full_logprobs(model, PROMPT, choice.token_ids)).abs().mean())


def test_a_completion_is_compressed_and_says_so(server, client, tiny_model):
    before = server.counters()
    answer = complete(client)
    done = figures(answer)
    assert answer.usage.prompt_tokens == 500
    assert answer.usage.completion_tokens == 150
    assert done["kv_tokens"] + done["tokens_evicted"] == 649  # the last token was never stored
    assert BUDGET <= done["kv_tokens"] <= BUDGET + INTERVAL
    assert done["compactions"] >= 2
    assert done["blocks_freed"] == done["tokens_evicted"] // BLOCK
    assert distance_to_full(tiny_model, answer) > 1
    after = server.counters()
    for name in ("tokens_evicted", "blocks_freed", "compactions"):
        counter = f"kvreclaim_{name}_total"
        assert after[counter] - before[counter] == done[name]
    assert after["kvreclaim_compression_seconds_total"] > before["kvreclaim_compression_seconds_total"]
    assert after["kvreclaim_requests_compressed_total"] == before["kvreclaim_requests_compressed_total"] + 1
    assert done["promised"] == f"budget {done['budget']}"
    for name in ("promised", "kept"):
        counter = f"kvreclaim_{name}_tokens_total"
        assert after[counter] - before[counter] == done["budget"]


def test_one_request_may_switch_it_off(server, client, tiny_model):
    before = server.counters()["kvreclaim_tokens_evicted_total"]
    answer = complete(client, "off")
    assert answer.model_extra.get("kv_transfer_params") is None
    assert distance_to_full(tiny_model, answer) <= 0.03
    assert server.counters()["kvreclaim_tokens_evicted_total"] == before


def test_one_request_may_ask_for_less(client):
    usual, less = figures(complete(client)), figures(complete(client, json.dumps({"budget": 64})))
    assert less["kv_tokens"] < usual["kv_tokens"]
    assert less["tokens_evicted"] > usual["tokens_evicted"]
    other = figures(complete(client, json.dumps({"policy": "streaming_llm", "interval": 32})))
    assert other["compactions"] > usual["compactions"]


def test_several_answers_to_one_prompt(server, client):
    before = server.counters()["kvreclaim_compactions_total"]
    answer = complete(client, n=2, temperature=1)
    first, second = answer.choices
    assert first.text != second.text
    both = server.counters()["kvreclaim_compactions_total"] - before
    assert both > figures(answer)["compactions"] >= 2  # the figures are those of one of them


def test_a_streamed_answer_is_the_whole_one(client):
    whole = complete(client)
    pieces = complete(client, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


def test_chat_streams_too(client):
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the same word " * 30}],
        "max_completion_tokens": 120,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**body, extra_body=fields() | {"ignore_eos": True})
    assert figures(whole)["blocks_freed"] > 0
    chunks = client.chat.completions.create(
        **body,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=fields() | {"ignore_eos": True},
    )
    *pieces, last = chunks
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert last.usage == whole.usage


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("nonsense", "no JSON"),
        ('{"policy": "snapkv"}', "snapkv"),
        ('{"policy": "nobody"}', "nobody"),
        ('{"budgets": 64}', "budgets"),
        (json.dumps({"budget": BUDGET + 1}), f"this server was started with {BUDGET}"),
        ('{"budget": -1}', "budget"),
        ('{"stats": "/etc/passwd"}', "loaded when the server starts"),
        (7, "7"),
    ],
)
def test_nonsense_is_a_400_of_that_request_alone(server, client, settings, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        complete(client, settings)
    assert "Traceback" not in caught.value.message
    assert server.process.poll() is None
    assert figures(complete(client, max_tokens=8))["blocks_freed"] > 0


def test_a_prompt_longer_than_the_pool_fits_compressed_only(client):
    long = random_prompts((BLOCK * BLOCKS + 100,), seed=6)[0]
    answer = complete(client, prompt=long, max_tokens=20)
    assert answer.usage.prompt_tokens == len(long)
    assert figures(answer)["kv_tokens"] <= BUDGET + INTERVAL
    with pytest.raises(openai.BadRequestError, match="keeps all its tokens"):
        complete(client, "off", prompt=long, max_tokens=20)


def test_a_dropped_text_is_cleared(client):
    """An answer to a chat with kv_drop is the one to a chat in which the text was never there."""
    before = [{"role": "user", "content": "a " * 40}, {"role": "assistant", "content": "b"}]
    last = {"role": "user", "content": "c"}

    def answer_to(first):
        params = {"model": client.models.list().data[0].id, "max_tokens": 8, "temperature": 0}
        return client.chat.completions.create(messages=[first, before[1], last], **params)

    dropped, cleared, whole = map(
        answer_to, ({**before[0], "kv_drop": "exact"}, {**before[0], "content": "[cleared]"}, before[0])
    )
    assert dropped.usage.prompt_tokens == cleared.usage.prompt_tokens < whole.usage.prompt_tokens
    assert dropped.choices[0].message.content == cleared.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="kv_drop is 'lossy', but inside vLLM"):
        answer_to({**before[0], "kv_drop": "lossy"})


def test_vllms_own_metrics_are_there(server, client):
    before = server.counters("vllm:")
    complete(client, max_tokens=8)
    after = server.counters("vllm:")
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 8
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_the_client_example_runs(server):
    out = run(EXAMPLES / "client.py", server.url)
    assert "'blocks_freed'" in out
    assert "kvreclaim_tokens_evicted_total" in out


def test_the_offline_example_runs(tiny_model, server):
    out = run(EXAMPLES / "offline.py", "--model", str(tiny_model), "--budget", "256", "--max-tokens", "60")
    usual, smaller, off = (line for line in out.splitlines() if " tokens, " in line)
    assert "blocks_freed" in usual
    assert "blocks_freed" in smaller
    assert off.endswith("not compressed")


def run(script: Path, *arguments: str) -> str:
    """Standard output of a script of examples/."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_it_ends_at_sigterm(server):
    """Last: the server does not come back."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert family  # the engine core
    assert "Traceback" not in server.text()
    assert server.stop() == 0
    _, alive = psutil.wait_procs(family, timeout=STOP_LIMIT_S)
    assert alive == []
    log = server.text()
    assert f"query_mixture, budget {BUDGET}" in log
    # vLLM's front end may log that the core, which ends first, is gone; no line of that is ours.
    assert not re.findall(r'File ".*/kvreclaim/.*', log)
