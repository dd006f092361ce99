"""Weights of the copy in the cache directory are those packed from the file, bit by bit, or the copy is made
anew."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tiny_gguf
import torch
from gguf import GGMLQuantizationType as Form
from transformers import AutoTokenizer
from typer.testing import CliRunner

from kvreclaim import LLM, SamplingParams
from kvreclaim.cli.main import app
from kvreclaim.model.gguf import as_in_llama_cpp
from kvreclaim.model.loader import LoadedModel, load_model
from kvreclaim.model.quantized import copy_file, packed_copy
from kvreclaim.model.quantized.copy_file import copy_path
from kvreclaim.model.quantized.gguf_file import GgufSource, gguf_parts
from kvreclaim.model.quantized.layers import _PackedModule
from kvreclaim.ops import extension
from kvreclaim.ops.packed import PackedMatrix
from kvreclaim.temporary import lock
from kvreclaim.weights.ggml import FORMATS, ggml_rows

pytestmark = pytest.mark.skipif(
    extension.unavailable_reason() is not None, reason="the native extension is not there"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ORDER_OF_BYTES = "cecf"
"""Digest of what version PACKED_LAYOUT 1 writes, of all formats."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    tiny_gguf.write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def kept(file: Path) -> LoadedModel:
    return load_model(file, cache_packed_weights=True)


def parts(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {
        f"{path}.{name}": part
        for path, module in loaded.model.named_modules()
        if isinstance(module, _PackedModule)
        for name, part in module.matrix.parts.items()
    }


def check_same(found: LoadedModel, wanted: LoadedModel) -> None:
    ours, theirs = parts(found), parts(wanted)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    for name, part in ours.items():
        assert part.dtype == theirs[name].dtype
        assert torch.equal(part.view(torch.uint8), theirs[name].view(torch.uint8)), name
    for name, parameter in wanted.model.named_parameters():
        assert torch.equal(found.model.get_parameter(name), parameter), name


@pytest.mark.parametrize(
    ("family", "form"), [("llama", Form.Q4_1), ("qwen3", Form.Q5_1), ("gemma2", Form.Q5_0)]
)
def test_weights_of_the_copy_are_those_of_the_file(family, form, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    tiny_gguf.write(file, family=family, form=form)
    packed = load_model(file)
    assert not copy_path(file).exists()
    made, mapped = kept(file), kept(file)
    assert (made.mapped_bytes, packed.mapped_bytes) == (0, 0)
    assert mapped.mapped_bytes >= sum(part.nbytes for part in parts(mapped).values())
    check_same(made, packed)
    check_same(mapped, packed)


def test_greedy_tokens_are_the_same(file: Path) -> None:
    prompts = tiny.prompts((5, 33), seed=1)
    answers = [
        [each.outputs[0].token_ids for each in LLM(file, num_blocks=64, **how).generate(prompts, GREEDY)]
        for how in ({"cache_packed_weights": False}, {}, {})
    ]
    assert answers[0] == answers[1] == answers[2]
    assert copy_path(file).is_file()


def test_nothing_is_kept_where_the_option_is_off(file: Path) -> None:
    LLM(file, num_blocks=64, cache_packed_weights=False)
    assert not copy_path(file).parent.exists()


@pytest.mark.parametrize("place", [0, 70_001, -200, -40, -1])
def test_a_changed_byte_is_noticed(place: int, file: Path, caplog) -> None:
    first = kept(file)
    copy = copy_path(file)
    whole = copy.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 4
    copy.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        again = kept(file)
    assert "is made again" in caplog.text
    assert again.mapped_bytes == 0
    check_same(again, first)
    assert copy.read_bytes() == whole
    assert kept(file).mapped_bytes > 0


@pytest.mark.parametrize("size", [0, 10, 4096, -4096, -1])
def test_a_piece_of_a_copy_is_noticed(size: int, file: Path) -> None:
    first = kept(file)
    copy = copy_path(file)
    whole = copy.read_bytes()
    copy.write_bytes(whole[:size])
    check_same(kept(file), first)
    assert copy.read_bytes() == whole


def test_another_layout_is_made_again(file: Path, monkeypatch) -> None:
    kept(file)
    before = copy_path(file).read_bytes()
    monkeypatch.setattr(packed_copy, "PACKED_LAYOUT", packed_copy.PACKED_LAYOUT + 1)
    assert kept(file).mapped_bytes == 0
    assert copy_path(file).read_bytes() != before
    assert kept(file).mapped_bytes > 0


def test_a_file_that_was_written_anew_is_packed_anew(file: Path) -> None:
    kept(file)
    time = file.stat().st_mtime_ns
    os.utime(file, ns=(time, time + 1))
    assert kept(file).mapped_bytes == 0
    other = file.with_name("other.gguf")
    tiny_gguf.write(other)
    other.write_bytes(other.read_bytes()[:-32] + bytes(32))  # weights alone differ
    os.utime(other, ns=(time, time + 1))
    os.replace(other, file)
    found = kept(file)
    assert found.mapped_bytes == 0
    check_same(found, load_model(file))


@pytest.mark.parametrize("blind", [(), ("changed_ns", "inode")])
def test_a_file_that_was_changed_in_place_with_its_old_time(blind, file: Path, monkeypatch) -> None:
    """blind: what the file system does not tell, so that contents alone do"""
    whole = packed_copy._origin
    monkeypatch.setattr(packed_copy, "_origin", lambda source: whole(source) | dict.fromkeys(blind, 0))
    kept(file)
    about = file.stat()
    with file.open("r+b") as opened:
        opened.seek(about.st_size - 4096)
        opened.write(bytes(4000))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    found = kept(file)
    assert found.mapped_bytes == 0
    check_same(found, load_model(file))


def test_the_sample_sees_every_tensor_and_large_changes_anywhere(file: Path, monkeypatch) -> None:
    monkeypatch.setattr(packed_copy, "STRIDE", stride := 3 * packed_copy.PAGE)
    source = GgufSource(file)
    first = packed_copy._sample(source)
    assert packed_copy._sample(source) == first
    whole = file.read_bytes()
    ends = [(t.offset, t.num_bytes) for t in source.index.tensors.values()]
    places = [at for start, size in ends for at in (start, start + size - 1)]
    for start, length in [
        *((at, 1) for at in places),
        *((at, 2 * stride) for at in range(0, len(whole), stride)),
    ]:
        changed = bytearray(whole)
        changed[start : start + length] = bytes(255 - byte for byte in whole[start : start + length])
        file.write_bytes(changed)
        assert packed_copy._sample(source) != first, start
    file.write_bytes(whole)


def test_where_nothing_can_be_written_the_model_loads(file: Path, caplog) -> None:
    load_model(file)  # its tokenizer is kept elsewhere
    copy_path(file).parent.write_text("no directory")
    with caplog.at_level(logging.WARNING):
        check_same(kept(file), load_model(file))
    assert "--no-cache-packed-weights" in caplog.text


@pytest.mark.parametrize("num_written", [0, 3])
def test_a_full_disk_leaves_nothing(num_written: int, file: Path, monkeypatch, caplog) -> None:
    class Full(packed_copy._Writer):
        def add(self, name: str, matrix: PackedMatrix) -> None:
            if len(self._matrices) == num_written:
                raise OSError(28, "No space left on device")
            super().add(name, matrix)

    monkeypatch.setattr(packed_copy, "_Writer", Full)
    with caplog.at_level(logging.WARNING):
        check_same(kept(file), load_model(file))
    assert "No space left" in caplog.text
    assert list(copy_path(file).parent.iterdir()) == []


def test_a_disk_with_little_room_is_left_alone(file: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(copy_file, "SPARE_BYTES", 1 << 60)
    with caplog.at_level(logging.WARNING):
        assert kept(file).mapped_bytes == 0
    assert "are free" in caplog.text
    assert not copy_path(file).exists()


def test_a_load_that_fails_leaves_nothing(file: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvreclaim.model.quantized.build.fill", fail)
    with pytest.raises(KeyboardInterrupt):
        kept(file)
    assert list(copy_path(file).parent.iterdir()) == []


def test_two_processes_at_once(file: Path) -> None:
    program = (
        "import sys; from kvreclaim.model.loader import load_model; "
        "print(load_model(sys.argv[1], cache_packed_weights=True).mapped_bytes)"
    )
    load_model(file)
    command = [sys.executable, "-c", program, str(file)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for each in both:
        _, errors = each.communicate(timeout=300)
        assert each.returncode == 0, errors.decode()[-2000:]
    mapped = kept(file)
    assert mapped.mapped_bytes > 0
    check_same(mapped, load_model(file))
    assert [path.suffix for path in copy_path(file).parent.iterdir()] == [".packed"]


def test_copies_are_bounded(file: Path, monkeypatch) -> None:
    others = [file.with_name(f"{i}.gguf") for i in range(3)]
    for i, other in enumerate(others):
        tiny_gguf.write(other)
        kept(other)
        os.utime(copy_path(other), (i, i))
    size = copy_path(others[0]).stat().st_size
    others[2].unlink()  # no file needs its copy
    left = copy_path(file).with_name(f"{copy_file.MAKING}x")
    left.touch()
    used = left.with_name(f"{copy_file.MAKING}y")
    writing = used.open("wb")
    lock(writing.fileno())
    room = int(file.stat().st_size * packed_copy.GROWTH)
    monkeypatch.setattr(copy_file, "MOST_BYTES", room + 2 * size)
    kept(others[0])  # used last
    kept(file)
    assert not left.exists()
    assert used.exists()
    writing.close()
    assert [copy_path(each).exists() for each in (file, *others)] == [True, True, False, False]


def test_ls_lists_copies_and_rm_deletes_them(file: Path) -> None:
    kept(file)
    name = f"packed/{copy_path(file).stem}"
    listed = CliRunner().invoke(app, ["ls"])
    assert any(line.split()[0] == name and "packed copy" in line for line in listed.stdout.splitlines())
    result = CliRunner().invoke(app, ["rm", name, "--yes"])
    assert result.exit_code == 0, result.output
    assert not copy_path(file).exists()
    assert file.exists()


def test_the_order_of_bytes_is_that_of_its_version() -> None:
    """A copy is made again when PACKED_LAYOUT is raised, and only then."""
    digest = hashlib.sha256()
    for name, form in FORMATS.items():
        size = 16 * 512 // form.columns * form.num_bytes
        data = torch.arange(size, dtype=torch.int64).mul(31).bitwise_and(127).to(torch.uint8).view(16, -1)
        matrix = PackedMatrix([ggml_rows(name, data)], 16)
        for part in sorted(matrix.parts):
            digest.update(matrix.parts[part].view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:4] == ORDER_OF_BYTES, "raise PACKED_LAYOUT, and write the digest here"


OTHER_ROOMS = ("ops.triton", "server", "bench", "eval", "calibrate", "plan", "sim", "integrations")
PROGRAM = """
import sys
from kvreclaim import LLM, SamplingParams
with LLM({file!r}, max_num_seqs=1, num_blocks=8) as llm:
    llm.generate(["ab"], SamplingParams(max_tokens=1))
print(*(name for name in sys.modules if name.startswith("kvreclaim.")))
"""


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
