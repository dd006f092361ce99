"""One thread, no network, and each tiny model written to disk once per session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import tiny
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> the directory of its saved model; read only, shared by all tests of the session."""
    saved: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in saved:
            saved[family] = tiny.save_model(family, tmp_path_factory.mktemp(family))
        return saved[family]

    return directory
