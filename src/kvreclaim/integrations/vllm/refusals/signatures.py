"""Check the installed vLLM against its family's expectations, in each process for the names that it uses.

The modules of vLLM's workers are looked at in workers only: importing them elsewhere changes what they patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvreclaim.integrations.vllm.refusals import expect
from kvreclaim.integrations.vllm.refusals.predicates import SLOT_DTYPES
from kvreclaim.integrations.vllm.settings.family import find_family


def sections() -> dict[str, tuple[expect.Function | expect.Names, ...]]:
    """The rows of the family's tables by section. Raises: UnsupportedVllmError."""
    return expect.read_table(*find_family().expected())


def check_front() -> None:
    """Check the front end, before the configuration is made. Raises: UnsupportedVllmError."""
    expect.check(sections()["front"])


def check_core() -> None:
    """Check the core, before the scheduler is made. Raises: UnsupportedVllmError."""
    expect.check(sections()["core"])


def check_connector(name: str) -> None:
    """Check a KV connector of this name and its scheduler, if there is one. Raises: UnsupportedVllmError."""
    table = sections()
    expect.check((*table["connector"], *table[f"connector {name}"]))


def check_drafter(kind: type) -> None:
    """Check a drafter with layers of its own. Raises: UnsupportedVllmError."""
    rows = sections()["drafter"]
    expect.check(rows)
    expect.check_overrides(kind, rows)


def check_snapshots() -> None:
    """Check what snapshots use of the block pool, if any are kept. Raises: UnsupportedVllmError."""
    expect.check(sections()["snapshots"])


def check_signals() -> None:
    """Check what hooks on layers use, if there are any. Raises: UnsupportedVllmError."""
    expect.check(sections()["signals"])


def check_centring() -> None:
    """Check what centred keys use, before the model is loaded. Raises: UnsupportedVllmError."""
    table = sections()
    expect.check((*table["worker"], *table["centred keys"]))


def check_worker(runner: Any) -> None:
    """Check the runner before it loads the model. Raises: UnsupportedVllmError."""
    table = sections()
    own = table["runner v2" if runner.vllm_config.use_v2_model_runner else "runner v1"]
    on_cpu = table["worker on a CPU"] if runner.device.type == "cpu" else ()
    expect.check((*table["worker"], *on_cpu, *own))
    expect.check_overrides(type(runner), own)


def check_cells(layers: Iterable[Any]) -> None:
    """Check what attention over cells uses, by the back-end of each layer. Raises: UnsupportedVllmError."""
    table = sections()
    names = {layer.attn_backend.get_name() for layer in layers}
    expect.check([*table["cells"], *(row for name in sorted(names) for row in table[f"cells {name}"])])


def check_layers(layers: Sequence[Any]) -> None:
    """The attention backends in use, by the implementation of each layer. Raises: UnsupportedVllmError."""
    table = sections()
    for name, kind in {(layer.attn_backend.get_name(), type(layer.impl)) for layer in layers}:
        expect.refuse(
            row.difference(kind) for row in table[f"backend {name}"] if isinstance(row, expect.Function)
        )
    if any(layer.kv_cache_dtype in SLOT_DTYPES for layer in layers):
        expect.check(table["slots"])
