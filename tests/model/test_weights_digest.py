"""Blocks on disk belong to the weights that made them, all of them, however they are run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvreclaim.model.loader import LoadedModel, load_model
from kvreclaim.offload.store.namespace import weights_digest


def digest(loaded: LoadedModel, num_threads: int = 1) -> str:
    model = loaded.model
    return weights_digest([*model.named_parameters(), *model.named_buffers()], num_threads)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_kernels_and_threads_change_no_digest(tiny_dir: Callable[[str], Path], name: str) -> None:
    native, plain = (load_model(tiny_dir(name), device="cpu", kernels=k) for k in ("native", "torch"))
    assert digest(native) == digest(plain, num_threads=3)
    assert digest(native) != digest(load_model(tiny_dir(name), device="cpu", dtype="bfloat16"))


@torch.no_grad()
def test_one_number_of_any_tensor_changes_it(tiny_dir: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_dir("llama"), device="cpu")
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    seen = {digest(loaded)}
    for tensor in tensors:
        last = tensor.view(-1)[-1:].view(torch.uint8)
        last[0] ^= 1
        seen.add(digest(loaded))
        last[0] ^= 1
    assert len(seen) == 1 + len(tensors)
