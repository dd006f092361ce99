"""Computes prompts with sparse attention, by the request's method or the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from kvreclaim.checks import require
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.compression.prefill.registry import make_method
from kvreclaim.config import EngineConfig
from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.step.engine import Engine
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.refusals import Feature, refuse
from kvreclaim.schedule.budget.sparse import SparseRows


@dataclass(frozen=True, slots=True)
class PrefillMethod:
    """sparse_prefill: the prompt's method, by name or as an object; "dense": full attention"""

    sparse_prefill: str | SparsePrefill


class SparsePrefills(RequestFeature):
    """A request without the option takes EngineConfig.sparse_prefill."""

    option = PrefillMethod
    prompt_keys: ClassVar = {"sparse_prefill": str}
    measured: ClassVar = {"sparse_prefill": (None, "dense")}

    def __init__(self, engine: Engine) -> None:
        self._config, self._facts = engine.config, engine.groups.facts
        self._default = default_prefill(self._config, self._facts, engine.features)
        self.is_default = self._default is not None

    @classmethod
    def http_fields(cls) -> dict[str, tuple[Any, Any]]:
        return {"sparse_prefill": (Literal["dense"] | None, None)}

    def conditions(self, spec: RequestSpec) -> Mapping[Feature, object]:
        method = self._method(spec)
        if method is None:
            return {}
        assert self._config.max_model_len is not None, "the engine's limits are set"
        found = {Feature.SPARSE_PREFILL: method.name}
        if not method.reads_all(self._config.max_model_len):
            found[Feature.SKIPS_BLOCKS] = method.name
        return found

    def claim(self, draft: RequestDraft) -> None:
        method = self._method(draft.spec)
        if method is None:
            return
        rows = check_sparse_prefill(method, self._config, self._facts)
        if rows is not None:
            draft.footprint = replace(draft.footprint, sparse=rows)
            draft.state[SparsePrefill] = method

    def _method(self, spec: RequestSpec) -> SparsePrefill | None:
        option = spec.option(PrefillMethod)
        given = self._default if option is None else option.sparse_prefill
        return make_method(given) if isinstance(given, str) else given


def default_prefill(
    config: EngineConfig, facts: ModelFacts, features: Mapping[Feature, object]
) -> SparsePrefill | None:
    """The engine's method of sparse prefill; None: dense. Raises: InvalidArgumentError."""
    method = make_method(config.sparse_prefill)
    if method is None:
        return None
    if method.slow:
        raise InvalidArgumentError(
            f"sparse prefill {method.name} takes about as long as dense attention does "
            "(docs/prompts.md); use pooled, a_shape or block_sparse, or compare it with them through "
            "a prompt's sparse_prefill, or `kvreclaim eval`.",
            field="sparse_prefill",
        )
    refuse({**features, Feature.SPARSE_PREFILL: method.name})
    check_sparse_prefill(method, config, facts)
    return method


def check_sparse_prefill(method: SparsePrefill, config: EngineConfig, facts: ModelFacts) -> SparseRows | None:
    """The rows of the method that the scheduler plans by; None where it leaves out nothing.

    Raises: InvalidArgumentError where it does not go with the model or the engine's limits.
    """
    method.check(facts, config.block_size)
    assert config.max_model_len is not None, "the engine's limits are set"
    if method.reads_all(config.max_model_len):
        return None
    rows = method.sparse_rows(facts.layers[0], config.block_size)
    least = rows.span + config.max_num_seqs
    require(
        config.max_num_batched_tokens >= least,
        f"sparse prefill {method.name} decides on {rows.span} tokens at once, and max_num_batched_tokens "
        f"{config.max_num_batched_tokens} may leave fewer beside {config.max_num_seqs} running sequences; "
        f"raise it to {least}, or lower max_num_seqs.",
        "sparse_prefill",
    )
    return rows
