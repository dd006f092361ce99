"""Engines over tiny models, with statistics where a policy needs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from kvreclaim import LLM
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.model_paths import STATS_FILE


@pytest.fixture(scope="session")
def calibrated_dir(tiny_dir: Callable[[str], Path], tmp_path_factory) -> Callable[[str], Path]:
    """family -> its directory with query statistics (4 centres) beside the weights."""
    saved: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in saved:
            path = tiny.save_model(family, tmp_path_factory.mktemp(f"{family}-calibrated"))
            llm = LLM(path, dtype="float32", device="cpu", num_blocks=8)
            documents = tiny.prompts((150, 40, 80), seed=5)
            calibrate(llm.loaded, documents, num_centers=4, kvzap="linear").save(path / STATS_FILE)
            saved[family] = path
        return saved[family]

    return directory


@pytest.fixture
def make_llm(calibrated_dir) -> Callable[..., LLM]:
    """(family, **engine arguments) -> an engine on tiny.DEVICE, in fp32 unless another dtype is given."""

    def make(family: str = "llama", **arguments) -> LLM:
        given = {"num_blocks": 200, "dtype": "float32", **arguments}
        return LLM(calibrated_dir(family), device=tiny.DEVICE, **given)

    return make
