"""One thread unless OMP_NUM_THREADS says otherwise, no network, nothing timed, and each tiny model written to
disk once per session.

Set by environment, so that tests of the integer rooms run without importing torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from kvreclaim.model_paths import real_model

SAMPLED = bool(os.environ.get("KVRECLAIM_TEST_SAMPLE"))
"""Whether costly grids run a fixed part of their cases, and properties fewer examples: `make test`."""
settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("sample", settings.get_profile("all"), max_examples=20)
settings.load_profile("sample" if SAMPLED else "all")
os.environ.setdefault("KVRECLAIM_TEST_REAL_MODEL", str(real_model() or ""))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    KVRECLAIM_HOME=os.devnull,  # holds no model, and takes none
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TRANSFORMERS_VERBOSITY="error",
)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS warns that it is not deterministic
os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # before transformers imports triton; 0 runs its tests on a GPU


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """No slow tests, and as many cases of the functions in sample.txt as it says, always the same ones."""
    if not SAMPLED:
        return
    lines = (Path(__file__).parent / "sample.txt").read_text().splitlines()
    limits = {name: int(count) for count, name in (line.split() for line in lines if line[:1] != "#")}
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped = {item for item in items if item.get_closest_marker("slow")}
    for name, found in cases.items():
        dropped.update(
            sorted(found, key=lambda item: crc32(item.nodeid.encode()))[limits.get(name, len(found)) :]
        )
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(autouse=True)
def logs_to_open_streams() -> Iterator[None]:
    """Libraries that a command imports keep its captured stderr for their logs, which is closed when the
    command ends. Later logs go to the stderr of their own time."""
    yield
    for name in ("transformers", "huggingface_hub"):
        logger = logging.getLogger(name)
        if any(isinstance(one, logging.StreamHandler) and one.stream.closed for one in logger.handlers):
            logger.handlers[:] = [logging.lastResort]


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Commands set the number of threads; a test leaves it as it was. Two workers with two threads
    each, on two cores, take four times as long."""
    yield
    torch, threads = sys.modules.get("torch"), int(os.environ["OMP_NUM_THREADS"])
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def real_dir() -> Path:
    """The language model that the user has fetched, for the few tests that are about it."""
    if not (named := os.environ["KVRECLAIM_TEST_REAL_MODEL"]):
        pytest.skip("no language model is here; `make real-model` brings it")
    if not (Path(named) / "kvreclaim_stats.safetensors").is_file():
        pytest.skip("the language model that is here has no statistics; `make real-model` brings them")
    return Path(named)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> the directory of its saved model; read only, shared by all tests of the session."""
    import tiny

    saved: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in saved:
            saved[family] = tiny.save_model(family, tmp_path_factory.mktemp(family))
        return saved[family]

    return directory
