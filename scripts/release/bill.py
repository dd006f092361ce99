"""Print a bill of materials, CycloneDX 1.6, of a wheel or of an environment that it is installed in.

bill.py wheel            for the wheel's .dist-info/sboms/, as in PEP 770
bill.py environment PY   every distribution installed for the Python PY, and the parts of our wheel
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
PARTS = (
    (
        "kvreclaim-demo-model",
        "machine-learning-model",
        "Apache-2.0",
        "trained by this project on made text",
    ),
    (
        "SmolLM2-135M-Instruct-statistics",
        "data",
        "Apache-2.0",
        "by `kvreclaim calibrate`; no weights",
    ),
    ("model-defaults", "data", "Apache-2.0", "read from transformers by scripts/docs.py"),
    ("nanobind", "library", "BSD-3-Clause", f"nanobind {version('nanobind')}"),
    ("robin-map", "library", "MIT", f"nanobind {version('nanobind')}"),
    ("libc++", "library", "Apache-2.0 WITH LLVM-exception", f"ziglang {version('ziglang')}"),
    ("compiler-rt", "library", "MIT", f"ziglang {version('ziglang')}"),
)
"""What a wheel holds that is not our code: name, type, licence (SPDX), source."""


def main() -> None:
    match sys.argv[1:]:
        case ["wheel"]:
            bill = bill_of_wheel()
        case ["environment", python]:
            bill = bill_of_environment(python)
        case _:
            sys.exit(__doc__)
    text = json.dumps(bill, indent=1)
    if (error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        sys.exit(f"the bill is not valid CycloneDX 1.6: {error}")
    print(text)


def bill_of_wheel() -> dict:
    own = _component("kvreclaim", "application", PROJECT["license"], PROJECT["description"])
    own |= {"version": PROJECT["version"], "purl": f"pkg:pypi/kvreclaim@{PROJECT['version']}"}
    moment = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"timestamp": moment.isoformat(), "component": own},
        "components": [_component(*part) for part in PARTS],
        "dependencies": [{"ref": "kvreclaim", "dependsOn": [name for name, *_ in PARTS]}],
    }


def bill_of_environment(python: str) -> dict:
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", python]
    bill = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (own,) = (part for part in bill["components"] if part["name"] == "kvreclaim")
    own["components"] = [_component(*part) for part in PARTS]
    return bill


def _component(name: str, kind: str, licence: str, source: str) -> dict:
    return {
        "type": kind,
        "name": name,
        "bom-ref": name,
        "description": source,
        "licenses": [{"expression": licence}],
    }


if __name__ == "__main__":
    main()
