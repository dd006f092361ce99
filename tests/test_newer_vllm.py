"""scripts/newer_vllm.py: kernels that are declared otherwise are found, however the declaration is broken."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "newer_vllm.py"
OLDER = """
  ops.def("silu_and_mul(Tensor! out, Tensor input) -> ()");
  ops.def(
      "attend(Tensor query, "
      "float scale) -> ()");
  ops.def("quantize() -> ()", placeholder_op);
"""
NEWER = """
  ops.def(
      "silu_and_mul(Tensor! out, Tensor input) "
      "-> ()");
  ops.def("attend(Tensor query, float scale) -> ()");
  ops.def("quantize(Tensor! result) -> ()");
"""


def test_declarations_are_compared_and_not_their_lines(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("newer_vllm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, text in (("older", OLDER), ("newer", NEWER)):
        bindings = tmp_path / name / "csrc" / "cpu" / "torch_bindings.cpp"
        bindings.parent.mkdir(parents=True)
        bindings.write_text(text)
    older, newer = (script._declared(tmp_path / name) for name in ("older", "newer"))
    assert len(older) == len(newer) == 3
    assert newer - older == {"quantize(Tensor! result) -> ()"}
