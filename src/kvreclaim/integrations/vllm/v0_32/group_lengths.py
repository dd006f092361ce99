"""Lengths of one cache group: its metadata builders see physical ones, those of the others logical ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvreclaim.integrations.vllm.settings.patching import wrap


class GroupLengths:
    """Physical lengths for the compressed group's metadata.

    step:    shifts of the step's requests, on the device and on the host; None: no request is shifted
    lengths: persistent, since CUDA graphs hold its address
    """

    def __init__(self, runner: Any) -> None:
        self.step: tuple[Tensor, Tensor] | None = None
        self.lengths = torch.zeros(runner.max_num_reqs, dtype=torch.int32, device=runner.device)

    def shorten(self, common: Any) -> Any:
        """Return the metadata with the lengths of the cache. max_seq_len is unchanged, as an upper bound."""
        lengths, bound = self.lengths[: common.num_reqs], common.seq_lens_cpu_upper_bound
        lengths.copy_(common.seq_lens)
        if self.step is not None:
            on_device, on_host = self.step
            lengths[: len(on_device)] -= on_device
            if bound is not None:
                bound = bound.clone()
                bound[: len(on_host)] -= on_host
        return common.replace(
            seq_lens=lengths, seq_lens_cpu_upper_bound=bound, _num_computed_tokens_cache=None
        )


def install(runner: Any, group: int, lengths: GroupLengths) -> None:
    """Have the builders of the group's attention metadata see these. Idempotent; later ones take the place of
    earlier ones."""
    for each in runner.attn_groups[group]:
        for builder in each.metadata_builders:
            builder.reclaim_lengths = lengths
            wrap(builder, "build", lambda build, own=builder: _shortened(build, own))  # type: ignore[misc]


def _shortened(build: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    def shortened(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        return build(
            common_prefix_len, builder.reclaim_lengths.shorten(common_attn_metadata), *args, **kwargs
        )

    return shortened
