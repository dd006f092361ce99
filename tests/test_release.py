"""What a client of the installed package sees of its types."""

import subprocess
import sys


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
