"""Bytes of formats are known without torch; that they are what pools take is in tests/ops/formats."""

from __future__ import annotations

import pytest

from kvreclaim.config import KV_CACHE_DTYPES
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.kv_bytes import KV_BYTES, kv_bytes
from kvreclaim.ops.formats import FORMATS


def test_the_formats_are_those_that_the_configuration_names() -> None:
    assert ("auto", *KV_BYTES) == KV_CACHE_DTYPES
    assert [form.dtype is not None for form in FORMATS.values()] == [f.is_plain for f in KV_BYTES.values()]


def test_auto_is_the_models_dtype_by_any_of_its_names() -> None:
    assert kv_bytes("auto", "bfloat16") is kv_bytes("bf16", "float32") is KV_BYTES["bf16"]
    assert kv_bytes("fp8", "fp16").keys.bits == 8
    with pytest.raises(InvalidArgumentError, match="int3"):
        kv_bytes("int3", "bf16")
