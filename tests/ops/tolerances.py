"""How far a kernel may be from the reference: one table for all back-ends."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-4},
}
"""By dtype of the result. Kernel and reference read the same numbers and sum in fp32.

float32:  sums of up to some thousand terms of size one in another order, and exp to about 3e-7.
float16:  the same sums rounded once: they may fall on neighbouring numbers, 2^-10 apart.
bfloat16: likewise, 2^-7 apart. atol covers results near zero, where terms cancel.
"""


def assert_close(got: Tensor, want: Tensor) -> None:
    """Same shape and dtype, within the dtype's tolerance; a NaN is a failure."""
    torch.testing.assert_close(got, want, **TOLERANCES[want.dtype])
