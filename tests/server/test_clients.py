"""OpenAI's and Anthropic's clients, as `make clients` drives them; Node's where they are installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from running import MODEL, Running, running_server

from kvreclaim import LLM

CLIENTS = Path(__file__).parents[1] / "clients"
ENVIRONMENT = CLIENTS.parents[1] / ".clients-env"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A random model, whose template has no place for tools, and which writes whatever a grammar allows."""
    path = tiny.save_model(
        "llama", tmp_path_factory.mktemp("served"), eos_token_id=262, max_position_embeddings=8192
    )
    tiny.tokenizer().save_pretrained(path)
    with running_server(LLM(path, num_blocks=1024)) as server:
        yield server


@pytest.mark.parametrize("name", ["openai_rows.py", "anthropic_rows.py", "node_rows.mjs"])
def test_what_clients_do(served: Running, name: str) -> None:
    command = [sys.executable, str(CLIENTS / name)]
    if name.endswith(".mjs"):
        if shutil.which("node") is None or not (ENVIRONMENT / "node_modules").is_dir():
            pytest.skip("Node's clients are not here; `make clients` brings them")
        command = ["node", str(shutil.copy(CLIENTS / name, ENVIRONMENT))]
    done = subprocess.run([*command, served.base_url, MODEL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) >= 7
    assert [row for row in rows if row[-1] != "ok"] == []


PAGE = Path(__file__).parents[2] / "docs" / "features.md"


def test_the_client_frees_blocks(server, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [example] = [block for block in blocks if "base_url" in block]
    names: dict[str, object] = {}
    exec(compile(example.replace("http://127.0.0.1:8000", server.base_url), "features", "exec"), names)
    names["client"].close()
    *_, cached, freed = capsys.readouterr().out.split()
    assert int(cached) >= 0
    assert int(freed) > 0
