"""The state of recurrent layers at the end of a session."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from kvreclaim.checks import require
from kvreclaim.engine.offload.offloaded_states import OffloadedStates
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.ops.states import StateStore
from kvreclaim.tiers.session_file import SessionFile

NAME = "state"


class SessionStates:
    """Copies states between their slots, on the device or the host, and a session file's tensor.

    on_host: None where no states lie there
    """

    def __init__(self, group: RecurrentGroup, store: StateStore, on_host: OffloadedStates | None) -> None:
        self.group, self.store, self.on_host = group, store, on_host

    def of(self, match: PrefixMatch) -> Tensor:
        """[state_bytes] uint8: the state behind a match that is not empty."""
        if match.state is not None:
            assert self.on_host is not None, "the match names a state on the host"
            return self.on_host.row(match.state)
        slot = self.group.checkpoint(match.entries[-1])
        assert slot is not None, "a match ends at a checkpoint"
        row = torch.empty(self.store.num_bytes, dtype=torch.uint8)
        self.store.write_bytes(slot, row)
        return row

    def check(self, file: SessionFile, path: str | os.PathLike[str]) -> Tensor:
        """The state in a file. Raises: InvalidArgumentError for none, or where nobody could begin with it."""
        require(
            self.group.sizes.num_checkpoints > 0,
            "a session of a model with recurrent layers is kept as a checkpoint, but state_checkpoints is 0; "
            "raise it.",
            "state_checkpoints",
        )
        row = file.tensors.get(NAME)
        fits = row is not None and row.dtype == torch.uint8 and tuple(row.shape) == (self.store.num_bytes,)
        require(fits, f"{os.fspath(path)} holds no state of this model; save it again.", "filename")
        assert row is not None, "just looked at"
        return row

    def enter(self, seq_id: int, row: Tensor) -> None:
        """Let a sequence's next state be this one."""
        self.store.read_bytes(self.group.pending(seq_id)[0], row)
