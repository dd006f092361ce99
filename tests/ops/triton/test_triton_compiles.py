"""Every kernel compiles for GPUs that are not here, fits their shared memory, is no worse than recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from compile_kernels import FACTS, SETS

PROGRAM = Path(__file__).with_name("compile_kernels.py")
RECORDED: dict[str, dict[str, dict[str, int]]] = {}
"""Triton and capability -> what was compiled -> its FACTS, by `compile_kernels.py CAPABILITY --record`."""
for what, found in json.loads(PROGRAM.with_name("compiled.json").read_text()).items():
    for compiler, values in found.items():
        RECORDED.setdefault(compiler, {})[what] = dict(zip(FACTS, values, strict=True))
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""By compute capability. 8.9 has the least of those with bf16."""
ROOM = {"registers": 16, "stack": 32, "shared": 0}
"""By how much a number may exceed the recorded one."""
MOST_STACK = 64
"""Bytes of a variant of which nothing is recorded."""
SLOW = pytest.mark.slow("minutes of compiling; plain caches are always compiled for, on 8.9 and 9.0")
FEW_SETS = ("plain", "rarer", "packed")
RECORDED_SETS: dict[int, Iterable[str]] = {
    80: FEW_SETS,
    89: (*FEW_SETS, "fp8_e4m3", "int8", "int4"),
    90: SETS,
    100: (*FEW_SETS, "fp8_e4m3", "int8"),
}

KERNELS = {
    "absorb_kernel",
    "compact_kernel",
    "copy_kernel",
    "decode_kernel",
    "expert_kernel",
    "gate_kernel",
    "gather_kernel",
    "latent_kernel",
    "mixture_kernel",
    "norm_kernel",
    "packed_product_kernel",
    "reduce_kernel",
    "rms_norm_kernel",
    "rotate_kernel",
    "route_kernel",
    "split_kernel",
    "sum_kernel",
    "surrogate_kernel",
    "tile_kernel",
    "trig_norm_kernel",
    "unpack_kernel",
    "write_kernel",
}


def compiled(capability: int, what: list[str], cache: Path) -> dict[str, dict[str, Any]]:
    """What was compiled -> its facts. KVRECLAIM_TRITON names the folder of another version of Triton."""
    path = [os.environ.get("KVRECLAIM_TRITON"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(capability), *what],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row.pop("what"): row for row in rows}


def check(capability: int, rows: dict[str, dict[str, Any]]) -> None:
    """Compare shared memory with the GPU's, everything else with what is recorded of this version of Triton,
    or of the newest one that is not newer, which may lack some."""
    version = rows.pop("triton")["version"]
    known = {compiler.split()[0] for compiler in RECORDED}
    newest = max((each for each in known if numbers(each) <= numbers(version)), key=numbers)
    recorded = RECORDED[f"{newest} sm_{capability}"]
    missing = rows.keys() - recorded.keys() if newest == version else {}
    assert not missing, "a kernel has no record"
    for what, row in rows.items():
        assert row["shared"] <= SHARED_BYTES[capability], (what, row)
        before = recorded.get(what, {"stack": MOST_STACK - ROOM["stack"]})
        worse = [name for name, room in ROOM.items() if name in before and row[name] > before[name] + room]
        worse += ["blocks"] if row["blocks"] < before.get("blocks", 1) else []
        worse += [name for name in ("tensor_cores", "cp_async") if row[name] < before.get(name, 0)]
        assert worse == [], (what, row, before)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


@pytest.mark.parametrize(
    "capability",
    [pytest.param(80, marks=SLOW), 89, 90, pytest.param(100, marks=SLOW)],
)
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    rows = compiled(capability, [], tmp_path)
    assert {what.split(": ")[1].split(" ")[0] for what in rows if what != "triton"} == KERNELS
    check(capability, rows)


@SLOW
@pytest.mark.parametrize(
    ("capability", "kernels"),
    [(capability, kernels) for capability, sets in RECORDED_SETS.items() for kernels in sets],
)
def test_every_variant_compiles(capability: int, kernels: str, tmp_path: Path) -> None:
    rows = compiled(capability, [kernels], tmp_path)
    check(capability, rows)
    if kernels in ("int8", "fp8_e4m3") or (kernels, capability) == ("int4", 90):
        ahead = rows[f"{kernels} k2 g4 d128 v128 bfloat16: decode_kernel 1"]["cp_async"]
        assert ahead >= 8, "codes are loaded ahead of time, in runs of 8 bytes and more"


def test_steps_of_other_sizes_compile_nothing_anew(tmp_path: Path) -> None:
    """A variant that a table's width or a count of tokens asks for would stall a live step for a second."""
    rows = compiled(90, ["steps"], tmp_path)
    found = Counter(what.split(": ")[1].split(" ")[0] for what in rows if what != "triton")
    two_kinds = dict.fromkeys(
        ("compact_kernel", "gate_kernel", "gather_kernel", "mixture_kernel", "surrogate_kernel"), 2
    )
    assert found == {
        **dict.fromkeys(KERNELS - {"packed_product_kernel", "unpack_kernel"}, 1),
        **two_kinds,
        **dict.fromkeys(("decode_kernel", "tile_kernel"), 2),  # over all of a sequence's tokens, or a share
        "reduce_kernel": 2,  # of single queries, and of those of a tile
        "absorb_kernel": 2,  # with the product, or rotation alone
        "latent_kernel": 2,  # stored or not
        "sum_kernel": 3,  # of experts in both dtypes, and with a residual
        "rms_norm_kernel": 8,
        "rotate_kernel": 5,
        "expert_kernel": 9,  # gate and up with each gate, and down; plain, clamped, shared; in fp32 one gate
        "route_kernel": 3,
    }


def test_a_worse_kernel_is_found() -> None:
    version = max((compiler.split()[0] for compiler in RECORDED), key=numbers)
    what, row = next(each for each in RECORDED[f"{version} sm_90"].items() if each[1]["tensor_cores"])
    for worse in (
        {"registers": row["registers"] + 17},
        {"stack": row["stack"] + 33},
        {"shared": 1 << 20},
        {"blocks": row["blocks"] - 1},
        {"tensor_cores": False},
        {"cp_async": row["cp_async"] - 1},
    ):
        with pytest.raises(AssertionError, match="kernel"):
            check(90, {"triton": {"version": version}, what: row | worse})
    check(90, {"triton": {"version": version}, what: row})
    with pytest.raises(AssertionError, match="no record"):
        check(90, {"triton": {"version": version}, f"another {what}": row})
