"""The fingerprint of a cell: two runs share a journal entry only if these JSON values are equal."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import kvreclaim
from kvreclaim.compression.policy import CompressionPolicy
from kvreclaim.compression.registry import make_policy
from kvreclaim.compression.stats import QueryStats
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.plan import SERVER, EvalPlan, GridColumn
from kvreclaim.eval.task import Task

SAMPLES_PER_TENSOR = 1024
PACKAGE = Path(kvreclaim.__file__).parent


def run_identity(llm: LLM, plan: EvalPlan, stats: QueryStats | None) -> dict[str, Any]:
    """Return the part that all cells of a run share."""
    facts, config = llm.loaded.facts, llm.engine.config
    return {
        "version": kvreclaim.__version__,
        "code": code_digest(),
        "model": facts.name,
        "fingerprint": facts.fingerprint,
        "config": facts.config,
        "weights": weights_digest(llm),
        "stats": None if stats is None else stats_digest(stats),
        "dtype": str(facts.dtype),
        "device": facts.device.type,
        "kernels": llm.engine.kernels,
        "kv_format": llm.engine.kv_format.fingerprint,
        "block_size": config.block_size,
        "chunk": config.max_num_batched_tokens,
        **plan.shared,
    }


def cell_identity(
    run: dict[str, Any],
    first: Mapping[str, Any],
    plan: EvalPlan,
    setting: GridColumn,
    task: Task,
    seed: int,
) -> dict[str, Any]:
    """Return everything that determines the results of one cell, except its number of examples.

    run, first: run_identity of the cell's engine, and of the baseline's engine
    """
    if setting.policy != SERVER:
        run = run | {
            "policy": repr(make_policy(setting.policy)),
            "policy_code": policy_digest(setting.policy),
        }
    return {
        **run,
        "compared_with": [first["kv_format"], first["kernels"]] if task.compares else None,
        "spec": setting.policy,
        "budget": setting.budget,
        "max_loss": [setting.max_loss, plan.content],
        "sparse_prefill": setting.sparse_prefill,
        "compared_prefill": plan.sparse_prefill[0],
        "chunk_reuse": setting.chunk_reuse,
        "compared_reuse": plan.chunk_reuse[0],
        "task": {"name": task.name, **task.identity},
        "seed": seed if task.seeded else None,
        "free_running": plan.free_running,
    }


def weights_digest(llm: LLM) -> str:
    """Digest of the weights, from up to SAMPLES_PER_TENSOR evenly spaced numbers of each tensor: training or
    fine-tuning changes nearly all of them, and a large model is not read whole."""
    digest = hashlib.sha256()
    for name, tensor in sorted(llm.loaded.model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLES_PER_TENSOR)].to("cpu", torch.float32)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(some.contiguous().numpy().tobytes())
    return digest.hexdigest()[:24]


def stats_digest(stats: QueryStats) -> str:
    digest = hashlib.sha256(stats.metadata.model_dump_json().encode())
    for field in fields(stats):
        value = getattr(stats, field.name)
        if isinstance(value, torch.Tensor):
            digest.update(field.name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:24]


@cache
def code_digest() -> str:
    """Digest of the package's sources and compiled kernels, so that a changed policy never reuses its old
    figures."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(file.relative_to(PACKAGE)).encode() + file.read_bytes())
    compiled = find_spec("kvreclaim._native")
    if compiled is not None and compiled.origin is not None:
        digest.update(Path(compiled.origin).read_bytes())
    return digest.hexdigest()[:24]


@cache
def policy_digest(spec: str) -> str:
    """Digest of the source files of the policies in a spec, including installed ones."""
    digest = hashlib.sha256()
    for policy in _all_policies(make_policy(spec)):
        file = inspect.getsourcefile(type(policy))
        digest.update(type(policy).__qualname__.encode())
        digest.update(Path(file).read_bytes() if file is not None else b"")
    return digest.hexdigest()[:24]


def _all_policies(policy: CompressionPolicy) -> Iterator[CompressionPolicy]:
    yield policy
    names: list[str] = [field.name for field in fields(policy)] if is_dataclass(policy) else []
    for name in names:
        value = getattr(policy, name)
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, CompressionPolicy):
                yield from _all_policies(part)
