"""Every kernel compiles for GPUs that are not here, fits their shared memory, is no worse than recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("compile_kernels.py")
RECORDED = json.loads(PROGRAM.with_name("compiled.json").read_text())
"""Triton -> capability -> what was compiled -> its facts, by `compile_kernels.py CAPABILITY --record`."""
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""By compute capability. 8.9 has the least of those with bf16."""
ROOM = {"registers": 16, "stack": 32, "shared": 0}
"""By how much a number may exceed the recorded one."""
MOST_STACK = 64
"""Bytes of a variant of which nothing is recorded."""

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
    or of the newest one that is not newer."""
    version = rows.pop("triton")["version"]
    known = [each for each in RECORDED if numbers(each) <= numbers(version)]
    recorded = RECORDED[max(known, key=numbers)].get(f"sm_{capability}", {})
    assert recorded, "nothing is recorded for this capability"
    for what, row in rows.items():
        assert row["shared"] <= SHARED_BYTES[capability], (what, row)
        before = recorded.get(what, {"stack": MOST_STACK - ROOM["stack"]})
        worse = [name for name, room in ROOM.items() if name in before and row[name] > before[name] + room]
        worse += ["blocks"] if row["blocks"] < before.get("blocks", 1) else []
        worse += [name for name in ("tensor_cores", "cp_async") if row[name] < before.get(name, 0)]
        assert worse == [], (what, row, before)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    rows = compiled(capability, [], tmp_path)
    assert {what.split(": ")[1].split(" ")[0] for what in rows if what != "triton"} == KERNELS
    recorded = RECORDED.get(rows["triton"]["version"], {}).get(f"sm_{capability}")
    assert recorded is None or rows.keys() - {"triton"} <= recorded.keys(), "a kernel has no record"
    check(capability, rows)


@pytest.mark.slow("minutes of compiling; plain caches are always compiled for")
@pytest.mark.parametrize(("capability", "what"), [(89, "formats"), (90, "formats")])
def test_kernels_of_coded_and_latent_caches_compile(capability: int, what: str, tmp_path: Path) -> None:
    rows = compiled(capability, [what], tmp_path)
    assert "encode_kernel" in {what.split(": ")[1].split(" ")[0] for what in rows if what != "triton"}
    check(capability, rows)
    ahead = ("int8", "fp8_e4m3", *(["int4"] if capability == 90 else []))
    loads = [rows[f"{name} alone: decode_kernel 1"]["cp_async"] for name in ahead]
    assert min(loads) >= 8, "codes are loaded ahead of time, in runs of 8 bytes and more"


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
    version = max(RECORDED, key=numbers)
    what, row = next((what, row) for what, row in RECORDED[version]["sm_90"].items() if row["tensor_cores"])
    row = {"cp_async": 0} | row
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
