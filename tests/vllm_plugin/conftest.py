"""vLLM in this process, on a CPU, from local files.

Only a run with this directory's pytest.ini (`make test-vllm`) collects its tests: they need vLLM's own
environment, one process per file, and vLLM's imports are full of warnings.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process, to be looked into
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # the same sums whatever else is in the batch
    "VLLM_CPU_CI_ENV": "1",  # no warm-up; torch.compile without inductor
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def _is_ours(config: pytest.Config) -> bool:
    return config.inipath == HERE / "pytest.ini"


def pytest_configure(config: pytest.Config) -> None:
    if _is_ours(config):
        if importlib.util.find_spec("vllm") is None:
            raise pytest.UsageError(
                "tests/vllm_plugin needs the environment that has vLLM: run `make test-vllm`."
            )
        for name, value in ENVIRONMENT.items():  # before anything imports vLLM or torch
            os.environ.setdefault(name, value)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if _is_ours(config) else True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the default tiny model."""
    from models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_stats(tiny_model: Path) -> Path:
    """Statistics of its queries, with centres and covariance, outside of its directory."""
    from models import make_stats

    return make_stats(tiny_model, tiny_model.with_name("tiny-stats.safetensors"))
