from __future__ import annotations

import numpy as np
import torch

from kvreclaim.ops.moving import fill, to_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VALUES = np.arange(6, dtype=np.int32).reshape(2, 3)


def test_values_come_to_the_device():
    for given in (VALUES, torch.from_numpy(VALUES), torch.from_numpy(VALUES).to(DEVICE)):
        there = to_device(given, DEVICE)
        assert (there.device.type, there.dtype, there.tolist()) == (DEVICE.type, torch.int32, VALUES.tolist())
    assert to_device(to_device(VALUES, DEVICE), torch.device("cpu")).tolist() == VALUES.tolist()


def test_a_tensor_that_is_there_is_not_copied():
    there = to_device(VALUES, DEVICE)
    assert to_device(there, DEVICE) is there


def test_what_has_been_sent_may_change_at_once():
    target, values = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE), VALUES.copy()
    fill(target, values)
    values[:] = -1
    assert target.tolist() == VALUES.tolist()
