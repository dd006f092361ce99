"""What `make dist` packs: the table of parts knows every file, wheels are written anew, types are seen."""

import base64
import csv
import hashlib
import importlib.util
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvreclaim

SCRIPTS = Path(__file__).parents[1] / "scripts" / "release"
PACKAGE = Path(kvreclaim.__file__).parent


def load(name):
    spec = importlib.util.spec_from_file_location(f"release_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_file_of_the_package_is_ours_or_a_named_part():
    contents = load("contents")
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    paths = [str(path.relative_to(PACKAGE.parent)) for path in files]
    found = {part.name for path in paths if (part := contents.part_of(path)) is not None}
    assert found == {part.name for part in contents.PARTS}


@pytest.mark.parametrize("path", ["kvreclaim/assets/font.woff2", "kvreclaim/page/static/d3.min.js"])
def test_a_file_that_nobody_named_stops_the_release(path):
    with pytest.raises(LookupError, match="no part"):
        load("contents").part_of(path)


def test_a_wheel_written_anew_has_its_record_and_the_same_bytes_each_time(tmp_path):
    repack = load("repack")
    wheels = [tmp_path / "a.whl", tmp_path / "b.whl"]
    for wheel, names in zip(wheels, (("p/x.py", "p/y.py"), ("p/y.py", "p/x.py")), strict=True):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("p-1.dist-info/RECORD", "")
            for name in names:
                archive.writestr(name, name * 9)
        repack.add_to_wheel(wheel, {"sboms/p.json": b"{}"}, "1700000000")
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    files = repack.read_wheel(wheels[0])
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(files["p-1.dist-info/RECORD"].decode()))}
    assert (
        rows.keys()
        == files.keys()
        == {f"p-1.dist-info/{n}" for n in ("RECORD", "sboms/p.json")}
        | {
            "p/x.py",
            "p/y.py",
        }
    )
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"{}").digest()).rstrip(b"=").decode()
    assert rows["p-1.dist-info/sboms/p.json"] == [f"sha256={digest}", "2"]


def test_a_client_sees_our_types(tmp_path):
    client = tmp_path / "client.py"
    client.write_text(
        "from kvreclaim import CompressionConfig, SamplingParams\n"
        "config = CompressionConfig(budget=384)\n"
        "reveal_type(config.budget)\n"
        "SamplingParams(temperature='hot')\n"
    )
    # From a folder of its own, as a user's project finds an installed package; torch's types take a minute.
    config = tmp_path / "mypy.ini"
    skipped = "".join(
        f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "transformers", "numpy")
    )
    config.write_text("[mypy]\nfollow_imports = silent\nignore_missing_imports = true\n" + skipped)
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "c")]
    environment = {"PATH": "/usr/bin", "MYPYPATH": "", "PYTHONPATH": ""}
    told = subprocess.run(
        [*command, str(client)], cwd=tmp_path, env=environment, capture_output=True, text=True
    ).stdout
    assert "Revealed type is" in told
    assert "int" in told.splitlines()[0], told
    assert 'incompatible type "str"; expected "float' in told
    assert "py.typed" not in told
