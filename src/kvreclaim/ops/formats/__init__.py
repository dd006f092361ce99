"""Formats of the KV cache: names and bytes (format.py), and codecs in PyTorch, the oracle of every kernel."""

from kvreclaim.ops.formats.format import FORMATS, KVFormat, groups, kv_format, plain_format

__all__ = ["FORMATS", "KVFormat", "groups", "kv_format", "plain_format"]
