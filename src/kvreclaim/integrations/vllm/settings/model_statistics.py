"""The default statistics of vLLM's model: the file next to its weights, the one that calibration keeps in the
cache directory, or a new one, made before vLLM loads the model.

A kept file is named by a sample of the weights, so finding it takes the loaded model. Its path is recorded by
the state of the model's files, which saves this at later starts until the files change.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model_paths import statistics_beside, stats_home
from kvreclaim.outputs import write_text, writing

READ = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a model on the hub that our loader reads; none of subfolders."""
NO_OVERRIDES = ("{}", "null")
"""JSON of hf_overrides that change nothing. Under others our own loader decides whether the file beside the
weights fits."""
REMEDY = 'name a file of `kvreclaim calibrate` as "stats", or a policy that needs none, such as streaming_llm'
logger = logging.getLogger("vllm.kvreclaim")


@dataclass(frozen=True, slots=True)
class ModelToLoad:
    """A model as vLLM loads it.

    path:      directory or .gguf file
    arguments: of our LLM, without the path
    nodes:     whether its workers may run on several machines
    """

    path: Path
    arguments: dict[str, Any]
    nodes: bool = False

    @classmethod
    def of_config(cls, config: Any, fetch: bool = True) -> ModelToLoad:
        """The model of a VllmConfig; one on the hub is fetched into the cache that vLLM reads.

        Raises: InvalidArgumentError for a model that only vLLM can load, or that is not here and not fetched.
        """
        model, parallel = config.model_config, config.parallel_config
        overrides = model.hf_overrides
        require(
            not callable(overrides),
            f"{model.model!r} cannot be calibrated with hf_overrides that is a function; {REMEDY}.",
        )
        arguments = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": config.device_config.device_type,
            "hf_overrides": json.dumps(overrides),
        }
        nodes = parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray"
        return cls(_local(model, config.load_config.download_dir, fetch), arguments, nodes)

    @property
    def state(self) -> str:
        """Digest of what the statistics depend on: the model's files, unread, and how it is loaded."""
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        seen = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return hashlib.sha256(json.dumps([seen, self.arguments]).encode()).hexdigest()


def find_statistics(model: ModelToLoad, calibrate: bool) -> str | None:
    """The file of a model's statistics. Of several processes that start together one calibrates.

    calibrate: make it if there is none; else None

    Raises: InvalidArgumentError.
    """
    if known := _at_hand(model):
        return known
    if not (calibrate or statistics_beside(model.path).is_file()) and not any(
        stats_home().glob("*.safetensors")
    ):
        return None
    with _lock(model):
        file = _noted(model) or _find_or_make(model, calibrate and not model.nodes)
        if file is not None:
            write_text(_note(model), file)
    require(
        file is not None or not calibrate,
        f"{str(model.path)!r} has no statistics, and what is made here the workers of other machines cannot "
        f"read; {REMEDY}.",
    )
    return file


def model_statistics_at_hand(config: Any) -> str | None:
    """Return the file next to the weights of a VllmConfig's model, or the one that an earlier start found.

    Loads and fetches nothing; None for a model that is not on this machine.
    """
    with suppress(InvalidArgumentError):
        return _at_hand(ModelToLoad.of_config(config, fetch=False))
    return None


def _at_hand(model: ModelToLoad) -> str | None:
    file = statistics_beside(model.path)
    if file.is_file() and model.arguments["hf_overrides"] in NO_OVERRIDES:
        return str(file)
    return _noted(model)


def _note(model: ModelToLoad) -> Path:
    return stats_home() / "vllm" / model.state


def _noted(model: ModelToLoad) -> str | None:
    note = _note(model)
    kept = note.read_text(encoding="utf-8") if note.is_file() else ""
    return kept if kept and Path(kept).is_file() else None


def _local(model: Any, cache: str | None, fetch: bool) -> Path:
    if Path(model.model).exists():
        return Path(model.model)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=cache,
                allow_patterns=list(READ),
                local_files_only=not fetch,
            )
        )
    except (OSError, ValueError) as error:  # what the hub's client raises for whatever it lacks
        raise InvalidArgumentError(
            f"{model.model!r} cannot be fetched to be calibrated ({error}); {REMEDY}."
        ) from error


@contextmanager
def _lock(model: ModelToLoad) -> Iterator[None]:
    """Lock the model's statistics. The lock ends with the process."""
    name = hashlib.sha256(str(model.path.resolve()).encode()).hexdigest()
    path = stats_home() / "vllm" / f"{name}.lock"
    try:
        with writing(path):
            file = path.open("w")
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"statistics cannot be kept in {str(stats_home())!r}; set KVRECLAIM_HOME to a directory that can "
            f"be written, or {REMEDY}."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process calibrates %s; this one waits for the statistics", model.path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_or_make(model: ModelToLoad, calibrate: bool) -> str | None:
    """Return the file that another process has found or made; None if there is none."""
    logger.info("no statistics of %s are noted; it is loaded to look for them by its weights", model.path)
    done = subprocess.run(
        [sys.executable, "-m", "kvreclaim.integrations.vllm.entry.calibrating"],
        input=json.dumps({"calibrate": calibrate, "model": str(model.path), **model.arguments}),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    require(
        "file" in answer,
        f"{str(model.path)!r} could not be calibrated "
        f"({answer.get('error', f'status {done.returncode}; its words are above')}); {REMEDY}.",
    )
    file: str | None = answer["file"]
    return file
