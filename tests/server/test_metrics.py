"""`/metrics` over HTTP: names, formats, keys that may read it, and counts of requests."""

from __future__ import annotations

import math
from collections.abc import Iterator

import httpx2
import pytest
import web
from exposition import Scrape
from running import MODEL, Running, openai_client, running_server
from steering import assert_empty, halted, until

from kvreclaim import LLM, demo_model
from kvreclaim.server.metrics.catalogue import CATALOGUE, MetricKind

EXPECTED = {
    "gauge": """
        vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
        kvreclaim:reclaim_efficiency kvreclaim:pinned_blocks kvreclaim:blocks_peak vllm:cache_config_info
        """,
    "counter": """
        vllm:prefix_cache_queries vllm:prefix_cache_hits vllm:prompt_tokens vllm:prompt_tokens_cached
        vllm:generation_tokens vllm:num_preemptions vllm:request_success
        kvreclaim:tokens_evicted kvreclaim:blocks_freed kvreclaim:compaction_seconds kvreclaim:scoring_seconds
        kvreclaim:prefix_misses kvreclaim:preemptions
        """,
    "histogram": """
        vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds vllm:e2e_request_latency_seconds
        vllm:request_queue_time_seconds
        """,
}
"""The names that users of vLLM know, and those that are promised beside them."""

LABELS = {"model_name": MODEL, "engine": "0"}


@pytest.fixture(scope="module")
def counted() -> Iterator[Running]:
    """A server whose counts are this module's alone."""
    with running_server(LLM(demo_model(), num_blocks=256, max_num_seqs=8, max_model_len=512)) as running:
        yield running


def scrape(server: Running, **headers: str) -> Scrape:
    return Scrape.of(web.get(f"{server.base_url}/metrics", headers=headers).text)


def complete(server: Running, **fields) -> httpx2.Response:
    body = {"model": MODEL, "prompt": "GO wind", "max_tokens": 4, **fields}
    return web.post(f"{server.base_url}/v1/completions", json=body)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in EXPECTED.items() for name in names.split()]
)
def test_promised_names(counted: Running, kind: str, name: str) -> None:
    family = scrape(counted).families[name]
    assert family.type == kind
    assert len(family.documentation) > 5
    assert family.samples
    for sample in family.samples:
        if not name.endswith("_info"):
            assert LABELS.items() <= sample.labels.items()
        if kind == "counter":
            assert sample.name == f"{name}_total"


def test_the_catalogue_is_what_is_exported(counted: Running) -> None:
    complete(counted)
    until(lambda: "http_requests_total" in scrape(counted).names)
    families = scrape(counted).families
    for metric in CATALOGUE:
        family = families.pop(metric.name)
        assert family.type == metric.kind.value, metric.name
        assert family.documentation == metric.meaning
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample
    assert all(name.startswith(("python_", "process_", "vllm:cache_config")) for name in families), families


def test_buckets_end_at_the_longest_sequence(counted: Running) -> None:
    rows = scrape(counted).rows("vllm:request_prompt_tokens_bucket")
    bounds = [float(labels["le"]) for labels, _ in rows]
    assert bounds == [1, 2, 5, 10, 20, 50, 100, 200, 500, math.inf]
    for metric in CATALOGUE:
        if metric.kind is MetricKind.HISTOGRAM:
            bounds = metric.bounds(512)
            assert list(bounds) == sorted(set(bounds)), metric.name


SCRAPERS = (
    None,
    "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,*/*;q=0.1",
)
"""The Accept headers of curl, and of Prometheus 2 and 3."""


@pytest.mark.parametrize("accept", SCRAPERS)
def test_every_scraper_gets_the_same_names(counted: Running, accept: str | None) -> None:
    answer = web.get(f"{counted.base_url}/metrics", headers={"accept": accept} if accept else {})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    assert sum(line.startswith("vllm:num_requests_running{") for line in lines) == 1
    assert not [line for line in lines if line.startswith(("vllm_", "kvreclaim_"))]


def test_an_answer_that_has_come_is_counted(counted: Running) -> None:
    """No client can see its answer before the metrics do."""
    before = scrape(counted).value("vllm:request_success_total", finished_reason="length")
    for turn in range(1, 9):
        complete(counted, ignore_eos=True)
        after = scrape(counted)
        assert after.value("vllm:request_success_total", finished_reason="length") == before + turn
        assert after.value("vllm:e2e_request_latency_seconds_count") == before + turn


def test_usage_and_metrics_agree(counted: Running) -> None:
    before = scrape(counted)
    prompt = " ".join(["GO", "wind", "oak", "fern"] * 12)
    usages = [complete(counted, prompt=prompt, cache_salt="usage").json()["usage"] for _ in range(2)]
    after = scrape(counted)
    for metric, reported in {
        "vllm:prompt_tokens_total": sum(u["prompt_tokens"] for u in usages),
        "vllm:generation_tokens_total": sum(u["completion_tokens"] for u in usages),
        "vllm:prompt_tokens_cached_total": sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages),
    }.items():
        assert reported > 0
        assert after.value(metric) - before.value(metric) == reported, metric


def test_answers_by_route_and_status(counted: Running) -> None:
    name, route = "kvreclaim:http_responses_total", "/v1/completions"
    before = scrape(counted)
    for fields in ({}, {"nonsense": 1}, {"model": "other"}):
        complete(counted, **fields)
    web.get(f"{counted.base_url}/no/such/route/4711")

    def grown(status: int, handler: str) -> float:
        labels = {"status": str(status), "handler": handler}
        return scrape(counted).total(name, **labels) - before.total(name, **labels)

    until(lambda: (grown(200, route), grown(400, route), grown(404, route)) == (1, 1, 1))
    until(lambda: grown(404, "unmatched") == 1)
    grouped = scrape(counted)
    assert grouped.value("http_requests_total", handler=route, status="4xx") == sum(
        grouped.total(name, handler=route, status=str(status)) for status in range(400, 500)
    )
    assert not any("4711" in str(sample) for sample in grouped.families["kvreclaim:http_responses"].samples)


def test_a_client_that_leaves(counted: Running) -> None:
    before = scrape(counted)
    extra = {"ignore_eos": True}
    with halted(counted), openai_client(counted) as client:
        stream = client.completions.create(
            model=MODEL, prompt="GO wind", max_tokens=400, stream=True, extra_body=extra
        )
        next(iter(stream))
        stream.close()
        assert_empty(counted)

    def grown(name: str, **labels: str) -> float:
        return scrape(counted).total(name, **labels) - before.total(name, **labels)

    until(lambda: grown("vllm:request_success_total", finished_reason="abort") == 1)
    until(lambda: grown("kvreclaim:http_responses_total", status="499") == 1)
    assert grown("vllm:e2e_request_latency_seconds_count") == 0


def test_two_servers_count_apart(counted: Running) -> None:
    llm = LLM(demo_model(), num_blocks=64, max_num_seqs=2, max_model_len=256)
    with running_server(llm, served_model_name=("other",)) as server:
        assert complete(counted).status_code == 200
        fresh = scrape(server)
        assert fresh.value("vllm:generation_tokens_total", model_name="other") == 0


def test_configuration(counted: Running) -> None:
    [(labels, value)] = scrape(counted).rows("vllm:cache_config_info")
    assert value == 1
    assert labels["block_size"] == "16"
    assert labels["num_gpu_blocks"] == "256"
    assert labels["enable_prefix_caching"] == "True"
    assert labels["cache_dtype"] == "fp32"
