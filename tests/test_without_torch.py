"""What decides, plans and simulates loads and runs where torch and transformers are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TRACE = TESTS / "sim" / "data" / "vllm-run-4090" / "requests.jsonl"
COMMAND = "from kvreclaim.cli.main import app\napp({!r})"
PLAN = ["plan", "--model", "Qwen3-32B", "--gpu", "4090", "--weights", "awq4", "--context", "500"]
PLAN += ["--trace", str(TRACE), "--recompute-p99-ms", "500", "--cards", "all", "--slo", "tpot=1s"]
PROGRAMS = {
    "formats": (
        "numpy",
        "from kvreclaim.kv_bytes import KV_BYTES; print(KV_BYTES['int4'].unit_bytes(128, 128, 16))",
        "2304",
    ),
    "rooms": (
        "numpy",
        "import kvreclaim.config, kvreclaim.memory, kvreclaim.schedule\n"
        "from kvreclaim.compression.spec.traits import footprint\n"
        "print(footprint('triattention:budget=512,interval=128').decode_cap)",
        "640",
    ),
    "schedules": (
        "numpy",
        f"sys.path.insert(0, {str(TESTS / 'schedule')!r})\n"
        "from test_scheduler_fuzz import run_world\n"
        "print(run_world(0, 300)['requests'] > 10)",
        "True",
    ),
    "every file of plan and sim": (
        "",
        "import pkgutil, importlib, kvreclaim.plan, kvreclaim.sim\n"
        "for room in (kvreclaim.plan, kvreclaim.sim):\n"
        "    for each in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "        importlib.import_module(each.name)\n"
        "from kvreclaim.plan.configs import load_shape; print(load_shape('Qwen3-8B').num_layers)",
        "36",
    ),
    "the engine's process is started": (
        "",
        "from kvreclaim.engine.serving import started\n"
        "started.PROGRAM = ('-c', 'import sys; sys.exit(len(sys.argv))')\n"
        "with started.StartedProcess() as process: print('ended with', process.process.wait())",
        "ended with",
    ),
    "several models are served": ("", "import kvreclaim.server.router.app; print('imported')", "imported"),
    "help and a mistake": (
        "numpy",
        "from kvreclaim.cli.main import app\n"
        "known = ['--help', 'serve --help', 'run --help', 'plan --help', 'bench decode --help']\n"
        "for line in (*known, 'generate --n 0'):\n"
        "    try: app(line.split())\n"
        "    except SystemExit as end: print(line, end.code)",
        "bench decode --help 0\n",
    ),
    "plan": ("", COMMAND.format(PLAN), "32 blocks, 128 MiB"),
    "simulate": (
        "",
        COMMAND.format(["simulate", "--gpu", "H100", "--requests", "3", "--rate", "2", "--json", "out.json"]),
        "drawn: 3 requests",
    ),
}


@pytest.mark.parametrize(("besides", "code", "output"), PROGRAMS.values(), ids=PROGRAMS)
def test_it_runs(besides: str, code: str, output: str, tmp_path: Path) -> None:
    blocked = f"import sys\nfor name in ('torch', 'transformers', {besides!r}): sys.modules[name] = None\n"
    command = [sys.executable, "-W", "error", "-c", blocked + code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert output in done.stdout
