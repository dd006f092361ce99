"""Drafters with layers of their own in the V1 runner of vLLM 0.32 (v1/spec_decode/llm_base_proposer.py).

Their layers lie in the target's cache group: the same block tables, lengths and slots. What the runner hands
over is physical already; slots that the proposer computes itself, from positions, are computed again here.
Positions stay logical: the drafter rotates by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from kvreclaim.integrations.vllm.refusals import signatures
from kvreclaim.integrations.vllm.refusals.loaded import refuse_layers
from kvreclaim.integrations.vllm.v0_32 import attention, probing
from kvreclaim.integrations.vllm.v0_32.worker_side import V1Rows
from kvreclaim.integrations.vllm.worker.layouts import CacheViews


class DraftHooks:
    """Over SpecDecodeBaseProposer. reclaim_rows: have the shifts of the step that is drafted for."""

    reclaim_rows: V1Rows

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> Any:
        """Slots of the target's tokens and of the next one, where the proposer takes that one in."""
        num_tokens, indices, common = super().set_inputs_first_pass(*args, **kwargs)  # type: ignore[misc]
        proposer: Any = self
        if self.reclaim_rows.step is not None and proposer.needs_extra_input_slots:
            lens = common.query_start_loc.diff()
            rows = torch.arange(len(lens), device=lens.device)
            self._place(common, rows.repeat_interleave(lens, output_size=num_tokens))
        return num_tokens, indices, common

    def _update_positions_dependent_metadata(
        self, positions: Tensor, common_attn_metadata: Any, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Slots of a draft of each request."""
        result = super()._update_positions_dependent_metadata(  # type: ignore[misc]
            positions, common_attn_metadata, batch_size, *args, **kwargs
        )
        if self.reclaim_rows.step is not None:
            rows = torch.arange(batch_size, device=common_attn_metadata.slot_mapping.device)
            self._place(common_attn_metadata, rows)
        return result

    def _place(self, common: Any, rows: Tensor) -> None:
        """Write the slots of tokens that belong to these rows; what is not to be stored stays so."""
        proposer: Any = self
        shift, size = self.reclaim_rows.step, proposer.block_size
        positions = proposer._get_positions(len(rows)).view(-1, len(rows))[0]
        slots = positions - shift.gpu[rows]
        blocks = common.block_table_tensor[rows, slots // size].long()
        stored = common.slot_mapping != PADDING_SLOT_ID
        common.slot_mapping.copy_(torch.where(stored, blocks * size + slots % size, PADDING_SLOT_ID))


@dataclass(frozen=True, slots=True, eq=False)
class DraftLayers:
    """A drafter's own layers on this worker. config: vLLM's of its model."""

    config: Any
    layers: Sequence[Any]
    views: CacheViews


def adopt_drafter(runner: Any, rows: V1Rows) -> DraftLayers | None:
    """Have the runner's drafter place its tokens by these rows. Idempotent; later rows take the place of
    earlier ones.

    Returns: what passes have to be carried out on; None: it has no layers.
    Raises: UnsupportedVllmError, UnsupportedModelError, InvalidArgumentError.
    """
    names = probing.drafter_layers(runner)
    if not names:
        return None
    signatures.check_drafter(type(runner.drafter))
    found = get_layers_from_vllm_config(runner.vllm_config, Attention)
    refuse_layers({name: found[name] for name in names})
    layers = [found[name] for name in sorted(names, key=extract_layer_index)]
    config = runner.speculative_config.draft_model_config
    caches = [attention.layer_cache(layer, config.dtype) for layer in layers]
    views = CacheViews(caches, attention.num_blocks(runner))
    views.prove()
    runner.drafter.reclaim_rows = rows
    if not isinstance(runner.drafter, DraftHooks):
        kind = type(runner.drafter)
        runner.drafter.__class__ = type(f"Reclaim{kind.__name__}", (DraftHooks, kind), {})
    return DraftLayers(config, layers, views)
