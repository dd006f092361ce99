"""Imports of a command before it begins: its own options alone, and torch without garbage collection."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_gguf

from kvreclaim.cli.main import COMMANDS
from kvreclaim.ops import extension

OTHER_ROOMS = ("ops.triton", "server", "bench", "eval", "calibrate", "plan", "sim", "integrations", "demo")
SHARED = {"main", "options", "config_file", "config_options", "help", "model_names", "uncollected"}
"""Files of the command line that are no command."""
WATCH = """
import gc, sys
class Watch:
    def find_spec(self, name, *more):
        if name in ("torch", "transformers"): print(name, "collected" if gc.isenabled() else "alone")
sys.meta_path.insert(0, Watch())
from kvreclaim.cli.main import app
"""
GENERATE = """
try: app({arguments!r})
except SystemExit as ended: assert not ended.code, ended.code
assert gc.isenabled()
print(*(name for name in sys.modules if name.startswith("kvreclaim.")))
"""
SERVE = """
from kvreclaim.engine.serving import started
def begin(): raise SystemExit("begun")
started.StartedProcess = begin
app(["serve", "--model", "demo", *{arguments!r}])
"""

BOUND = """
from contextlib import nullcontext
from kvreclaim.engine.serving import started
from kvreclaim.server.http import listener
started.StartedProcess = nullcontext
def bind(*address): raise SystemExit(f"bound {'kvreclaim.server.entry.run' in sys.modules}")
listener.bind = bind
app(["serve", "--model", "demo"])
"""


def run(program: str, home: Path) -> subprocess.CompletedProcess[str]:
    code = f"import os; os.environ['KVRECLAIM_HOME'] = {str(home)!r}\n{WATCH}{program}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason="the native extension is not there")
@pytest.mark.parametrize("compression", [[], ["--kv-compression", "knorm", "--kv-budget", "256"]])
def test_generate_imports_no_other_command_and_no_other_room(tmp_path: Path, compression: list[str]) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    given = ["--model", str(tmp_path / "tiny.gguf"), "--num-blocks", "16", "--max-tokens", "1"]
    done = run(GENERATE.format(arguments=["generate", "--prompt", "ab", *given, *compression]), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, last = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("torch ")] == ["torch alone"]
    assert [line for line in lines if line.startswith("transformers ")] == ["transformers alone"]
    loaded = last.split()
    assert "kvreclaim.engine.step.engine" in loaded
    assert [
        name for name in loaded if name.startswith(tuple(f"kvreclaim.{room}" for room in OTHER_ROOMS))
    ] == []
    assert {name.split(".")[2] for name in loaded if name.startswith("kvreclaim.cli.")} == {
        "generate",
        *SHARED,
    }


@pytest.mark.parametrize("arguments", [[], ["--max-num-seqs", "4"]])
def test_the_engines_process_of_serve_begins_before_torch_is_imported(
    tmp_path: Path, arguments: list[str]
) -> None:
    done = run(SERVE.format(arguments=arguments), tmp_path)
    assert done.stderr.splitlines()[-1:] == ["begun"], done.stderr[-2000:]
    assert done.stdout == ""


def test_what_serves_is_imported_while_the_engine_loads(tmp_path: Path) -> None:
    done = run(BOUND, tmp_path)
    assert done.stderr.splitlines()[-1:] == ["bound False"], done.stderr[-2000:]


@pytest.mark.parametrize("command", ["run", "serve", "generate --prompt a", "eval", "calibrate", "plan"])
def test_a_model_that_is_not_there_is_refused_before_torch_is_imported(tmp_path: Path, command: str) -> None:
    name, *options = command.split()
    done = run(f"app({[name, '--model', 'nonesuch', *options]!r})", tmp_path)
    assert done.returncode == 2
    assert "nonesuch" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tasks", "recall,recal"], "did you mean recall?"),
        (["--tasks", "ruler:vat"], "RULER has niah_single_1"),
        (["--budgets", "0.5,0"], "budget is 0"),
        (["--kv-cache-dtype", "int7"], "kv_cache_dtype is 'int7'"),
        (["--chunk-reuse", "most"], "'most'"),
        (["--seeds", "-1"], "a seed is -1"),
    ],
)
def test_what_an_evaluation_cannot_run_is_refused_before_torch_is_imported(
    tmp_path: Path, given: list[str], message: str
) -> None:
    done = run(f"app({['eval', '--model', 'demo', *given]!r})", tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("given", [["--policies", "full,knrom"], ["--sparse-prefill", "flesh"]])
def test_an_unknown_method_is_refused_before_a_model_is_loaded(tmp_path: Path, given: list[str]) -> None:
    done = run(f"app({['eval', '--model', 'demo', *given]!r})", tmp_path)
    assert done.returncode == 2
    assert f"{given[1].removeprefix('full,')!r} is unknown" in done.stderr
    assert "transformers" not in done.stdout


def test_a_port_in_use_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(f"app(['serve', '--model', 'demo', '--port', '{port}'])", tmp_path)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in done.stderr
    assert done.stdout == ""


def test_the_servers_process_imports_none_of_transformers_models(tmp_path: Path) -> None:
    """They, and what of torch they import, are in the engine's process."""
    program = "import kvreclaim.server.entry.run, kvreclaim.engine.serving.process\n"
    done = run(f"{program}print(*(name for name in sys.modules if name.count('.') < 2))", tmp_path)
    loaded = done.stdout.splitlines()[-1].split()
    assert "fastapi" in loaded, done.stderr
    heavy = {"transformers.modeling_utils", "transformers.models", "torch._dynamo", "scipy.optimize", "sympy"}
    assert heavy.isdisjoint(loaded)


def test_a_name_that_is_no_command_is_compared_with_all(tmp_path: Path) -> None:
    done = run("app(['generat'])", tmp_path)
    assert done.returncode == 2
    assert "generate" in done.stderr.replace("generat'", "")


def test_the_help_names_every_command_in_order_and_imports_none(tmp_path: Path) -> None:
    done = run("import atexit, sys\natexit.register(lambda: print(*sys.modules))\napp(['--help'])", tmp_path)
    names = done.stdout.splitlines()[-1].split()
    loaded = {name.split(".")[-1] for name in names if name.startswith("kvreclaim.cli.")}
    assert "main" in loaded
    assert loaded <= SHARED
    lines = [line.strip().split(" ")[0] for line in done.stdout.splitlines()[:-1]]
    assert [word for word in lines if word in COMMANDS] == list(COMMANDS)
