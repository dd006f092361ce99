"""`kvreclaim ls` shows what is in the cache directory; `kvreclaim rm` deletes only what `fetch` put there."""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import tiny_gguf
from typer.testing import CliRunner

from kvreclaim.cli.main import app
from kvreclaim.cli.model_names import model_of
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model_paths import REAL_MODEL, STATS_FILE, num_bytes_of, write_source

runner = CliRunner()


def run(*arguments: object, **given):
    return runner.invoke(app, [str(argument) for argument in arguments], **given)


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("KVRECLAIM_HOME", os.fspath(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def models(home: Path) -> Path:
    """A fetched model with a GGUF file and statistics, a packed one, a user's own, and a broken one."""
    configs = {
        "plain": {"dtype": "bfloat16", "max_position_embeddings": 512},
        "owner--packed": {
            "text_config": {"max_position_embeddings": 4096},
            "quantization_config": {"quant_method": "awq", "bits": 4},
        },
        "own": {"torch_dtype": "float32"},
        "broken": {},
    }
    for name, config in configs.items():
        (home / name).mkdir(parents=True)
        (home / name / "config.json").write_text(json.dumps(config))
    tiny_gguf.write(home / "plain" / "tiny.gguf")
    for name in ("plain", "owner--packed", "broken"):
        write_source(home / name, "a test")
    (home / "plain" / STATS_FILE).write_bytes(b"1234")
    (home / "broken" / "config.json").unlink()
    return home


def test_ls_shows_what_is_here(models: Path) -> None:
    when = datetime(2026, 5, 4, 3, 2).timestamp()
    os.utime(models / "plain" / "kvreclaim_source.json", (when, when))
    result = run("ls")
    assert result.exit_code == 0, result.output
    head, *rows = (line.split() for line in result.stdout.splitlines())
    assert head == ["name", "size", "modified", "weights", "context", "statistics"]
    cells = {row[0]: row[1:] for row in rows}
    assert list(cells) == ["broken", "own", "owner--packed", "plain", "plain/tiny.gguf"]
    assert cells["plain"][:4] == [f"{num_bytes_of(models / 'plain') / 1e6:,.0f}", "MB", "2026-05-04", "03:02"]
    about = {name: " ".join(row[4:]) for name, row in cells.items()}
    assert about == {
        "broken": "? ? no",
        "own": "float32 ? no",
        "owner--packed": "awq 4 bits 4096 no",
        "plain": "bfloat16 512 yes",
        "plain/tiny.gguf": "Q4_1 512 no",
    }
    assert result.stderr == "broken: it lacks config.json, or a part of it\n"


def test_ls_without_models(home: Path) -> None:
    result = run("ls")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "`kvreclaim fetch` brings one" in result.stderr
    assert not home.exists()


def test_names_of_ls_are_models(models: Path, monkeypatch) -> None:
    monkeypatch.setattr("kvreclaim.cli.model_names.why_not_on_hub", lambda _: None)
    assert model_of("plain") == models / "plain"
    assert model_of("plain/tiny.gguf") == models / "plain" / "tiny.gguf"
    assert model_of("owner/packed") == models / "owner--packed"
    assert model_of("own") == models / "own"
    assert model_of("other/name") == "other/name"  # a hub id
    for name in ("broken", "nothing", "", "a message"):
        with pytest.raises(InvalidArgumentError, match="is no model here"):
            model_of(name)
    monkeypatch.chdir(models)
    assert model_of("plain") == "plain"  # what lies here comes first


@pytest.mark.parametrize("name", ["PLAIN", "Plain/TINY.gguf", "Owner/Packed", "OWNER--packed"])
def test_case_does_not_matter(models: Path, name: str) -> None:
    exact = {each.casefold(): each for each in ("plain", "plain/tiny.gguf", "owner--packed")}
    assert model_of(name) == models / exact[name.casefold().replace("owner/", "owner--")]


def test_names_that_differ_by_case_alone_are_both_found(models: Path) -> None:
    shutil.copytree(models / "own", models / "OWN")
    assert (model_of("own"), model_of("OWN")) == (models / "own", models / "OWN")
    with pytest.raises(InvalidArgumentError, match="did you mean"):
        model_of("Own")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("plian", "plain"), ("smollm2", REAL_MODEL), ("SmolLM2-135-Instruct", REAL_MODEL), ("dmeo", "demo")],
)
def test_a_typo_names_the_nearest_and_all_that_are_here(models: Path, name: str, meant: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        model_of(name)
    assert f"did you mean {meant}?" in str(error.value)
    assert "Models here: own, owner--packed, plain, plain/tiny.gguf, demo." in str(error.value)
    assert error.value.field == "model"


def test_a_hub_that_does_not_answer_is_named(models: Path, monkeypatch) -> None:
    monkeypatch.setattr("kvreclaim.cli.model_names.why_not_on_hub", lambda _: "the hub is out of reach")
    for name, fetches in (("other/name", False), ("other/name-GGUF:Q4_K_M", True)):
        with pytest.raises(InvalidArgumentError, match="no model here, and the hub is out of reach"):
            model_of(name, fetches=fetches)


def test_a_directory_that_holds_one_gguf_file_is_that_file(home: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "files", home / "Mine"):
        place.mkdir(parents=True)
        tiny_gguf.write(place / "tiny.gguf")
        (place / "mmproj-tiny.gguf").write_bytes(b"")
    assert model_of(os.fspath(tmp_path / "files")) == tmp_path / "files" / "tiny.gguf"
    assert model_of("mine") == home / "Mine" / "tiny.gguf"
    tiny_gguf.write(tmp_path / "files" / "other.gguf")
    with pytest.raises(InvalidArgumentError, match=r"2 GGUF files \(other.gguf, tiny.gguf\); name one"):
        model_of(os.fspath(tmp_path / "files"))
    with pytest.raises(InvalidArgumentError, match="no GGUF file"):
        model_of(os.fspath(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InvalidArgumentError, match=r"notes.txt' is no model; pass a file that ends in .gguf"):
        model_of(os.fspath(tmp_path / "notes.txt"))


def test_a_gguf_file_of_the_hub_is_one_model(home: Path, monkeypatch) -> None:
    directory = home / "some--tiny-GGUF--Q4_1"
    directory.mkdir(parents=True)
    tiny_gguf.write(directory / "tiny-Q4_1.gguf")
    write_source(directory, "hub:some/tiny-GGUF:Q4_1")
    file = directory / "tiny-Q4_1.gguf"
    row = run("ls").stdout.splitlines()[1].split()
    assert (row[0], row[-3:]) == (directory.name, ["Q4_1", "512", "no"])
    for name in ("some/tiny-GGUF:Q4_1", directory.name):
        assert model_of(name) == model_of(name.upper()) == file
    with pytest.raises(InvalidArgumentError, match="`kvreclaim fetch some/tiny-GGUF:Q8_0` brings it"):
        model_of("some/tiny-GGUF:Q8_0")
    monkeypatch.setattr("kvreclaim.cli.model_names.fetched", lambda *_: directory)
    monkeypatch.setattr("kvreclaim.cli.model_names.why_not_on_hub", lambda _: None)
    for written in ("", "hf.co/", "https://huggingface.co/"):
        assert model_of(f"{written}some/tiny-GGUF:Q5_0", fetches=True) == file  # `run` fetches it
    assert run("rm", "some/tiny-GGUF:Q4_1", "--yes").exit_code == 0
    assert not directory.exists()


ODD_NAME = "e\x1b[31mvil\n\udcff.gguf"


def test_files_that_cannot_be_read_are_listed_and_removed(models: Path) -> None:
    """Their names and contents may hold control sequences, or no text at all."""
    whole = (models / "plain" / "tiny.gguf").read_bytes()
    forged = whole.replace(b"llama.context_length", b"llama.\x1b]0;OWNED\x07_le")
    for name, content in {"cut.gguf": whole[:300], ODD_NAME: forged[:900], "none.gguf": b""}.items():
        (models / name).write_bytes(content)
    (models / "own" / "gone.gguf").symlink_to("nowhere")
    (models / "own" / "folder.gguf").mkdir()
    (models / "own" / "config.json").write_text("[" * 100_000)
    result = run("ls")
    assert result.exit_code == 0, result.output
    assert all(line.isprintable() for line in result.output.splitlines())
    shown = r"e\x1b[31mvil\n\udcff.gguf"
    for name in ("cut.gguf", shown, "none.gguf"):
        assert f"{name}: it cannot be read: " in result.stderr
    assert "gone" not in result.output
    for name in ("cut.gguf", shown, "none.gguf"):
        done = run("rm", name, "--yes")
        assert (done.exit_code, done.stdout) == (0, f"{name}: 0 MB freed\n")
    assert not [each for each in models.iterdir() if each.suffix == ".gguf"]
    assert run("rm", "plain/tiny.gguf", "--yes").exit_code == 2  # it can be read


def test_a_missing_package_makes_no_file_removable(models: Path, monkeypatch) -> None:
    shutil.move(models / "plain" / "tiny.gguf", models / "tiny.gguf")
    monkeypatch.setattr("kvreclaim.model.gguf_index.find_spec", {}.get)
    assert "tiny.gguf: it cannot be read: reading GGUF files needs gguf" in run("ls").stderr
    assert run("rm", "tiny.gguf", "--yes").exit_code == 2


def test_run_fetches_the_default_model_by_its_name(models: Path, monkeypatch) -> None:
    monkeypatch.setattr("kvreclaim.cli.model_names.fetched", lambda source, output: models / REAL_MODEL)
    assert model_of(REAL_MODEL.lower(), fetches=True) == models / REAL_MODEL


def test_rm_asks_deletes_and_says_what_was_freed(models: Path) -> None:
    size = f"{num_bytes_of(models / 'plain') / 1e6:,.0f} MB"
    refused = run("rm", "plain", input="n\n")
    assert refused.exit_code == 1
    assert f"Delete {models / 'plain'} ({size})?" in refused.stderr
    assert (models / "plain").is_dir()
    before = {path.name for path in models.iterdir()}
    done = run("rm", "plain", input="y\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"plain: {size} freed"
    assert {path.name for path in models.iterdir()} == before - {"plain"}
    assert run("rm", "owner/packed", "--yes").exit_code == 0
    assert run("rm", "broken", "--yes").exit_code == 0
    assert {path.name for path in models.iterdir()} == {"own"}


def test_rm_deletes_nothing_that_fetch_did_not_write(models: Path, tmp_path: Path, monkeypatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(models / "plain", elsewhere)
    (models / "link").symlink_to(elsewhere)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for name in ("own", "plain/tiny.gguf", "link", elsewhere, "elsewhere", "../models/plain", ".", "..", ""):
        result = run("rm", "--yes", name)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("error: ")
        assert "broken, owner--packed, plain" in result.stderr
        assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_ls_shows_what_killed_commands_left_and_rm_deletes_it(models: Path) -> None:
    left = models / ".kvreclaim-fetch-x"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(3_000_000))
    listed = run("ls")
    assert listed.stdout.splitlines()[-1].split()[:3] == ["models/.kvreclaim-fetch-x", "3", "MB"]
    assert "`kvreclaim rm models/.kvreclaim-fetch-x` deletes it" in listed.stderr
    done = run("rm", "models/.kvreclaim-fetch-x", "--yes")
    assert done.stdout == "models/.kvreclaim-fetch-x: 3 MB freed\n"
    assert not left.exists()
    left.mkdir()
    assert run("rm", "plain", "--yes").exit_code == 0
    assert not left.exists()


@pytest.mark.parametrize("whole", [True, False])
def test_rm_deletes_nothing_behind_a_link(whole: bool, home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tiny_gguf.write(file := elsewhere / "tiny-Q4_1.gguf")
    if whole:
        write_source(elsewhere, "hub:some/tiny-GGUF:Q4_1")
    else:
        file.write_bytes(file.read_bytes()[:100])  # `rm` takes a damaged file of its own
    home.mkdir(parents=True)
    (home / "link").symlink_to(elsewhere)
    before = sorted(tmp_path.rglob("*"))
    for name in ("link", "link/tiny-Q4_1.gguf"):
        result = run("rm", "--yes", name)
        assert result.exit_code == 2, result.output
    assert sorted(tmp_path.rglob("*")) == before
