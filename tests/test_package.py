"""The package's public face."""

from __future__ import annotations

import kvreclaim


def test_every_public_name_is_there():
    assert all(getattr(kvreclaim, name) is not None for name in kvreclaim.__all__)
