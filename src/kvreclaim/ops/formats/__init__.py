"""Formats of the KV cache: names and dtypes (format.py), codecs in PyTorch, the oracle of every kernel."""

from kvreclaim.ops.formats.format import FORMATS, KVFormat, kv_format, plain_format

__all__ = ["FORMATS", "KVFormat", "kv_format", "plain_format"]
