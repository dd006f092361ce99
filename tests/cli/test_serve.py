"""`kvreclaim serve`: what its options become, and the messages of mistakes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvreclaim.cli.main import app
from kvreclaim.config import EngineConfig
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.entry.run import facts_of_start

runner = CliRunner()


@pytest.fixture
def started(monkeypatch) -> list:
    """(llm, config) of each server that was about to serve; none does."""
    found: list = []

    def serve(engine, config, listener) -> bool:
        listener.close()
        found.append((engine.llm, config))
        return True

    monkeypatch.setattr("kvreclaim.server.entry.run.serve", serve)
    monkeypatch.setattr("kvreclaim.cli.serve.configure_logging", lambda *_, **__: None)
    return found


def run(*arguments: object):
    """In one process, so that the engine can be looked at."""
    ours = ["--model", "demo", "--port", "0", "--no-engine-process"]
    return runner.invoke(app, ["serve", *ours, *map(str, arguments)])


def test_without_further_options_it_is_on_loopback(started: list) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    [(llm, config)] = started
    default = ServerConfig(served_model_name=("kvreclaim-demo",), port=0, engine_process=False)
    assert config == default
    assert default.host == "127.0.0.1"
    engine = llm.engine.config
    chosen = ("num_blocks", "max_model_len", "max_signal_bytes")
    own = {name: getattr(engine, name) for name in chosen}
    assert engine == EngineConfig(**own, conversation_snapshots=True, threads=0)
    assert engine.max_signal_bytes > 0
    assert llm.compression is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("API keys: none needed", "compression: none, every token is kept")),
        (
            ("--api-key", "x", "--kv-compression", "knorm", "--kv-budget", 1024, "--max-model-len", 700),
            (
                "API keys: 1",
                "compression: knorm, 1,024 tokens per KV head",
                "context: 700 tokens",
            ),
        ),
    ],
)
def test_the_start_is_described(monkeypatch, arguments: tuple, words: tuple[str, ...]) -> None:
    lines: list[str] = []

    def serve(engine, config, listener) -> bool:
        port = listener.getsockname()[1]
        lines.extend(facts_of_start(engine.served, config, listener))
        assert lines[0].startswith(f"serving kvreclaim-demo at http://127.0.0.1:{port} ")
        model = engine.llm.loaded.model.config
        token_bytes = 2 * 4 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
        assert f", {65_536 * token_bytes / (1 << 30):.2f} GiB of fp32" in lines[3]
        return listener.close() is None

    monkeypatch.setattr("kvreclaim.server.entry.run.serve", serve)
    monkeypatch.setattr("kvreclaim.cli.serve.configure_logging", lambda *_, **__: None)
    assert run(*arguments, "--num-blocks", 4096).exit_code == 0
    assert "pool: 4,096 blocks of 16 tokens, 65,536 tokens" in lines[3]
    for text in words:
        assert any(text in line for line in lines)


def test_every_option_arrives(started: list, tmp_path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    server = {
        "served-model-name": "a",
        "operator-key": "op",
        "max-body-bytes": 2048,
        "max-n": 3,
        "max-queue-len": 4,
        "max-concurrent-requests-per-key": 5,
        "min-kv-compression-interval": 32,
        "max-kv-budget": 300,
        "max-kv-query-window": 8,
        "default-max-tokens": 6,
        "shutdown-timeout": 7,
        "chat-template": template,
    }
    engine = {
        "scheduling-policy": "priority",
        "eviction-policy": "slru",
        "max-pinned-fraction": 0.25,
        "num-gpu-blocks-override": 99,
        "max-num-seqs": 9,
        "max-model-len": 512,
        "block-size": 8,
        "kv-cache-dtype": "fp8",
        "kv-memory-fraction": 0.25,
        "kv-compression": "knorm",
        "kv-budget": 200,
    }
    options = [part for name, value in (server | engine).items() for part in (f"--{name}", value)]
    result = run(*options, "--api-key", "x", "--api-key", "y", "--log-prompts", "--enforce-eager")
    assert result.exit_code == 0, result.output
    [(llm, config)] = started
    assert config == ServerConfig(
        port=0,
        engine_process=False,
        served_model_name=("a",),
        api_keys=("x", "y"),
        operator_key="op",
        max_body_bytes=2048,
        max_n=3,
        max_queue_len=4,
        max_concurrent_requests_per_key=5,
        min_kv_compression_interval=32,
        max_kv_budget=300,
        max_kv_query_window=8,
        default_max_tokens=6,
        shutdown_timeout_s=7.0,
        chat_template="{{ messages[0].content }}",
        log_prompts=True,
    )
    found = llm.engine.config
    assert (found.scheduling_policy, found.eviction_policy) == ("priority", "slru")
    assert found.max_pinned_fraction == 0.25
    assert (found.num_blocks, found.max_num_seqs, found.max_model_len, found.block_size) == (99, 9, 512, 8)
    assert (found.kv_memory_fraction, found.enforce_eager) == (0.25, True)
    assert found.kv_cache_dtype == llm.engine.kv_format.name == "fp8_e4m3"
    assert (llm.compression.policy, llm.compression.budget) == ("knorm", 200)


def test_a_budget_alone_is_auto(started: list) -> None:
    assert run("--kv-budget", "200").exit_code == 0
    compression = started[0][0].compression
    assert (compression.policy, compression.budget) == ("shares(query_mixture, by=static)", 200)


def test_a_key_may_come_from_the_environment(started: list, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_API_KEY", "from-env")
    assert run().exit_code == 0
    assert started[0][1].api_keys == ("from-env",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "ports end at 65535"),
        (["--host", "nonesuch.invalid"], "cannot listen on nonesuch.invalid"),
        (["--api-key", ""], "an API key is empty"),
        (["--api-key", "x", "--api-key", "x"], "named twice"),
        (["--api-key", "clé"], "beyond ASCII"),
        (["--max-queue-len", "0"], "max_queue_len is 0"),
        (["--max-body-bytes", "5"], "max_body_bytes is 5"),
        (["--min-kv-compression-interval", "0"], "min_kv_compression_interval is 0"),
        (["--max-kv-budget", "0"], "max_kv_budget is 0"),
        (["--max-kv-query-window", "-1"], "max_kv_query_window is -1"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout_s is -1.0"),
        (["--chat-template", "nonesuch.jinja"], "nonesuch.jinja is no file of UTF-8 text"),
        (["--scheduling-policy", "nonesuch"], "fcfs, priority, cache"),
        (["--eviction-policy", "nonesuch"], "lru"),
        (["--max-pinned-fraction", "2"], "max_pinned_fraction is 2.0"),
        (["--kv-compression", "nonesuch"], "nonesuch"),
        (["--kv-cache-dtype", "int3"], "kv_cache_dtype is 'int3'"),
        (["--model", "/nonesuch"], "/nonesuch"),
    ],
)
def test_a_mistake_is_one_sentence(started: list, arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert not started
    [sentence] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert words in sentence


@pytest.mark.parametrize("key", ["--api-key", "--operator-key"])
def test_what_outlives_the_process_needs_names_that_do(started: list, tmp_path, key: str) -> None:
    lasting = (key, "k", "--responses-db", tmp_path)
    refused = run(*lasting)
    assert refused.exit_code == 2
    assert "tenant_secret is not" in refused.output
    assert not started
    assert run(*lasting, "--tenant-secret", "s" * 32).exit_code == 0


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_template_that_is_no_text(started: list, tmp_path, content: bytes | None) -> None:
    template = tmp_path / "chat.jinja"
    if content is None:
        template.mkdir()
    else:
        template.write_bytes(content)
    result = run("--chat-template", template)
    assert result.exit_code == 2
    assert "is no file of UTF-8 text" in result.stderr
