"""Identifies what the bytes of blocks on disk depend on besides tokens; blocks of others are never read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from kvreclaim.checks import require

FIELDS = (
    "record_version",
    "config",
    "model_fingerprint",
    "weights_digest",
    "products",
    "kv_semantics",
    "dtype",
    "rope",
    "kv_format",
    "block_size",
    "backend_layout",
)
"""The record's version, the model's config, facts and weights, how packed weights are multiplied, the meaning
of the forward pass, the model's dtype, its rotation with scaling, the KV format, tokens per block, and the
back end with its device and layout version: key layouts differ between back ends."""

CHUNK_BYTES = 64 << 20


class Namespace:
    """A digest of all that blocks depend on.

    Args:
        fields: exactly FIELDS, as text

    Raises: InvalidArgumentError for a field that is missing or unknown.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        wrong = sorted(set(fields) ^ set(FIELDS))
        require(
            not wrong,
            f"a namespace of blocks on disk has the fields {', '.join(FIELDS)}; missing or unknown: {wrong}.",
        )
        self.fields = {name: fields[name] for name in FIELDS}
        message = b"".join(_field(part.encode()) for pair in self.fields.items() for part in pair)
        self.digest = hashlib.sha256(message).digest()

    @property
    def hex(self) -> str:
        return self.digest.hex()


def weights_digest(tensors: Iterable[tuple[str, Tensor]], num_threads: int = 1) -> str:
    """Compute sha256 over every byte of named tensors, with their names, dtypes and shapes.

    Tensors are hashed separately and their digests in the order of the names, so the result does not depend
    on num_threads. Tensor subclasses (packed and quantised weights) are hashed by their components.

    Args:
        tensors: all parameters and buffers of a model, each name once

    Raises: InvalidArgumentError for a tensor with unreadable bytes.
    """
    parts = sorted((part for name, tensor in tensors for part in _parts(name, tensor)), key=lambda p: p[0])
    with ThreadPoolExecutor(num_threads) as pool:
        digests = list(pool.map(_digest, (tensor for _, _, tensor in parts)))
    whole = hashlib.sha256()
    for (name, kind, tensor), digest in zip(parts, digests, strict=True):
        for text in (name, kind, str(tensor.dtype), str(tuple(tensor.shape))):
            whole.update(_field(text.encode()))
        whole.update(digest)
    return whole.hexdigest()


def _field(payload: bytes) -> bytes:
    """Length-prefixed, so that different lists of fields never give the same bytes."""
    return len(payload).to_bytes(8, "little") + payload


def _parts(name: str, tensor: Tensor, kind: str = "") -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, kind of component, plain tensor) for all components of a tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
        require(
            plain,
            f"{name} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, whose bytes can't be "
            "read to name blocks on disk after the weights; run this model without a disk tier.",
        )
        yield name, kind, tensor.detach()
        return
    names, context = flatten()
    for part in names:
        yield from _parts(f"{name}.{part}", getattr(tensor, part), f"{kind}{type(tensor).__name__}{context}")


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    digest = hashlib.sha256()
    for chunk in flat.split(CHUNK_BYTES):
        digest.update(memoryview(chunk.cpu().numpy()))
    return digest.digest()
