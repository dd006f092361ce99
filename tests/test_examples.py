"""examples/ as a stranger would use them: installed by pip, run by their own scripts and commands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "examples" / "third_party_policy"
SPECS = ("fading_values", "segments(fading_values(half_life=64), n=4)")


def run(*arguments: str, cwd: Path, site: Path | None = None) -> str:
    """Standard output of this Python with these arguments; fails with the error output."""
    paths = [str(path) for path in (site, os.environ.get("PYTHONPATH")) if path]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the package built and installed into it, without a network."""
    source, site = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, source)
    how = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run("-m", "pip", "install", *how, "--target", str(site), ".", cwd=source)
    return site


def test_its_own_script_checks_the_contract_and_frees_blocks(installed):
    lines = run("try_it.py", cwd=PACKAGE, site=installed).splitlines()
    assert [line.rpartition(": ")[0] for line in lines] == list(SPECS)
    assert all(int(line.split()[-3]) > 0 for line in lines)


def test_its_command_compares_it_with_others(installed, tmp_path):
    readme = (PACKAGE / "README.md").read_text(encoding="utf-8")
    (command,) = (line for line in readme.splitlines() if line.startswith("    kvreclaim eval"))
    given = ["--num-examples", "1", "--num-tokens", "600", "--json", str(tmp_path / "out.json")]
    app = ("-c", "from kvreclaim.cli.main import app; app()")
    run(*app, *shlex.split(command)[1:], *given, cwd=PACKAGE, site=installed)
    rows = {row["policy"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert set(rows) == {"full", *SPECS}
    assert rows["full"]["value"] == 1.0
    for spec in SPECS:
        assert rows[spec]["status"] == "ok"
        assert rows[spec]["blocks_freed"] > 0
        assert rows[spec]["kv_bytes"] < rows["full"]["kv_bytes"]


def test_an_extension_counts_tokens():
    assert run("examples/count_tokens.py", cwd=ROOT) == "12 tokens computed\n"


def test_a_feature_of_requests_is_one_folder_and_one_line():
    folder = ROOT / "examples" / "request_feature"
    assert run("try_it.py", cwd=folder).splitlines() == [
        "Python: as after the longer prompt: True",
        "HTTP: the same: True",
        "usage: 3 tokens",
        "400: answer_prefix has 3 tokens, but max_tokens is 3; shorten it or raise max_tokens.",
        'kvreclaim:answer_prefix_tokens_total{engine="0",model_name="demo"} 6.0',
    ]
    assert (folder / "try_it.py").read_text().count("FEATURES += (") == 1


def test_a_policy_object_needs_no_package():
    short, full = run("examples/own_policy.py", cwd=ROOT).splitlines()
    assert int(short.removeprefix("loud_values: ").split()[0]) > 0
    assert full == "None: 0 blocks freed"


def test_without_its_package_it_is_unknown():
    code = "from kvreclaim.compression.registry import make_policy; make_policy('fading_values')"
    with pytest.raises(AssertionError, match="policy 'fading_values' is unknown"):
        run("-c", code, cwd=ROOT)


def test_it_is_as_short_as_the_page_says_and_shows():
    files = {path.name: path.read_text(encoding="utf-8") for path in PACKAGE.glob("*.py")}
    total = sum(len(text.splitlines()) for text in files.values())
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    assert total <= 40
    assert f"{total} lines of Python" in page
    assert files["fading_values.py"].partition("@dataclass")[2].strip() in page
