"""Is this vLLM the 0.32 that we were written against? Checked in each process for what that process uses.

The modules of vLLM's workers are looked at in workers only: importing them elsewhere changes what they patch.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from kvreclaim.integrations.vllm import expect

TABLE = "expected.txt"


def sections() -> dict[str, tuple[expect.Function | expect.Names, ...]]:
    """The rows of expected.txt by section."""
    return expect.read_table(files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))


def check_front() -> None:
    """Where the configuration is made. Raises: UnsupportedVllmError."""
    expect.check(sections()["front"])


def check_core() -> None:
    """Before the scheduler is made. Raises: UnsupportedVllmError."""
    expect.check(sections()["core"])


def check_worker(runner: Any) -> None:
    """Once the runner is made, before it loads the model. Raises: UnsupportedVllmError."""
    table = sections()
    own = table["runner v2" if runner.vllm_config.use_v2_model_runner else "runner v1"]
    on_cpu = table["worker on a CPU"] if runner.device.type == "cpu" else ()
    expect.check((*table["worker"], *on_cpu, *own))
    expect.check_overrides(type(runner), own)


def check_layers(layers: Iterable[Any]) -> None:
    """The attention backends in use, by the implementation of each layer. Raises: UnsupportedVllmError."""
    table = sections()
    for name, kind in {(layer.attn_backend.get_name(), type(layer.impl)) for layer in layers}:
        expect.refuse(
            row.difference(kind) for row in table[f"backend {name}"] if isinstance(row, expect.Function)
        )
