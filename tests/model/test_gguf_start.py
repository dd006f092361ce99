"""What a start from a GGUF file reads and imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_gguf
from transformers import AutoTokenizer

from kvreclaim.model.gguf import as_in_llama_cpp
from kvreclaim.model.loader import load_model
from kvreclaim.model.quantized.gguf_file import GgufSource, gguf_parts
from kvreclaim.ops import extension

pytestmark = pytest.mark.skipif(
    extension.unavailable_reason() is not None, reason="the native extension is not there"
)
OTHER_ROOMS = ("ops.triton", "server", "bench", "eval", "calibrate", "plan", "sim", "integrations")
PROGRAM = """
import sys
from kvreclaim import LLM, SamplingParams
with LLM({file!r}, max_num_seqs=1, num_blocks=8) as llm:
    llm.generate(["ab"], SamplingParams(max_tokens=1))
print(*(name for name in sys.modules if name.startswith("kvreclaim.")))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    tiny_gguf.write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_the_kept_tokenizer_is_that_of_the_file(file: Path) -> None:
    own = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    as_in_llama_cpp(own, GgufSource(file).index.fields, print)
    loaded = load_model(file).tokenizer
    assert loaded is not None
    assert loaded.backend_tokenizer.to_str() == own.backend_tokenizer.to_str()
    assert loaded.special_tokens_map == own.special_tokens_map
    text = (gguf_parts(GgufSource(file)) / "tokenizer.json").read_text(encoding="utf-8")
    assert "\n" not in text
    assert len(text) < 0.7 * len(own.backend_tokenizer.to_str(pretty=True))


def test_a_start_on_a_cpu_imports_no_other_room(file: Path) -> None:
    program = PROGRAM.format(file=str(file))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = done.stdout.split()
    assert "kvreclaim.engine.step.engine" in loaded
    prefixes = tuple(f"kvreclaim.{room}" for room in OTHER_ROOMS)
    assert [name for name in loaded if name.startswith(prefixes)] == []
