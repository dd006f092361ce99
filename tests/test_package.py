"""The package's public face."""

from __future__ import annotations

import subprocess
import sys

import kvreclaim


def test_every_public_name_is_there():
    assert all(getattr(kvreclaim, name) is not None for name in kvreclaim.__all__)


def test_memory_loads_without_torch():
    code = "import sys, kvreclaim.memory; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
