"""States of recurrent layers as transformers reads them."""

from __future__ import annotations

import torch

from kvreclaim.model.recurrent import StateView
from kvreclaim.ops.states import StateShape


def test_states_are_read_by_methods_and_by_entries_of_a_layer() -> None:
    """transformers up to 5.23 takes a layer's entry out of the cache."""
    conv, ssm = torch.ones(1, 4, 3), torch.zeros(1, 2, 2)
    shapes = (StateShape("conv", 0, (4, 3), torch.float32), StateShape("recurrent", 0, (2, 2), torch.float32))
    view = StateView(shapes, {("conv", 0): conv, ("recurrent", 0): ssm})
    entry = view.layers[5]
    assert entry.conv_states[0] is view.get_conv_state(5) is conv
    assert entry.recurrent_states[0] is view.get_recurrent_state(5) is ssm
    assert entry.record_past is view.is_recording_past(5) is False
    entry.conv_states[0].zero_()
    assert not view.states["conv", 0].any()
