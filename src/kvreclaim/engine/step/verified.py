"""Verify mode of a request: its full cache gives the answer, a compressed one drafts."""

from __future__ import annotations

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression_settings import BUDGETS
from kvreclaim.config import EngineConfig
from kvreclaim.engine.request.spec import footprint_of
from kvreclaim.engine.request.verify import Verify
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.schedule.budget.check import check_blocks


def divided(compressor: Compressor | None) -> tuple[Compressor | None, Compressor | None]:
    """Split into the compressor that drafts and the one that compresses the request: one of them is None."""
    if compressor is not None and compressor.config.verify:
        return compressor, None
    return None, compressor


def verify_of(
    drafting: Compressor,
    groups: LayerGroups,
    config: EngineConfig,
    prompt: list[int],
    num_tokens: int,
) -> Verify:
    """Return the settings of verify mode for a request. num_tokens: most tokens it will have. Raises:
    InvalidArgumentError."""
    footprint = footprint_of(drafting, config, prompt, groups)
    check_blocks(footprint, drafting.policy.name)
    return Verify(drafting, footprint, drafting.config.verify_tokens, budgets_of(drafting, num_tokens))


def budgets_of(compressor: Compressor, num_tokens: int) -> tuple[int, ...]:
    """Return the steps of an automatic budget, up to the first that holds num_tokens; none for a fixed
    budget."""
    config = compressor.config
    if not config.auto_budget:
        return ()
    first = next((i for i, b in enumerate(BUDGETS) if b >= num_tokens), len(BUDGETS))
    return tuple(b for b in BUDGETS[: first + 1] if b >= config.budget)
