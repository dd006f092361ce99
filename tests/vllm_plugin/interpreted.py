"""Triton's interpreter in place of its compiler. To be imported first: Triton decides as it is loaded."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

assert "triton" not in sys.modules, "Triton was imported before its interpreter was chosen"
os.environ["TRITON_INTERPRET"] = "1"


def use_v2_runner() -> None:
    """Engines made from now on run vLLM's V2 model runner, which needs Triton, on a CPU as well."""
    from triton.backends import Backend, backends

    # vLLM counts Triton as usable where a driver is active. The interpreter needs none.
    backends["cpu"] = Backend(compiler=None, driver=SimpleNamespace(is_active=lambda: True))
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
