"""The header of a record: describes its payload, and has checksums of itself and the payload.

    0   "KVRT"          u16 version      u16 flags
    8   namespace 32    40 key 32        72 parent key 32    104 uid 16     120 parent uid 16
    136 u32 depth       140 u32 tokens   144 u64 payload bytes
    152 u8 kind of checksum, 7 zeros     160 checksum 16
    176 u64 seq         184 u64 written at (Unix seconds)
    192 tokens, i64 each; zeros; in the last 4 bytes the crc32 of all before

Little endian. Before a payload the header fills whole pages of 4096 bytes (up to 487 tokens: one); the index
has the same header without most of the zeros.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from struct import Struct
from typing import Final

from xxhash import xxh3_128_digest

from kvreclaim.memory.prefix.index import BlockName
from kvreclaim.offload.store.jobs import JobOutcome

PAGE: Final = 4096
MAGIC: Final = b"KVRT"
VERSION: Final = 1
XXH3_128: Final = 1
TOKEN_BYTES: Final = 8

HEAD = Struct("<4sHH32s32s32s16s16sIIQB7x16sQQ")
CRC = Struct("<I")


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """namespace: 32 bytes; checksum: 16 bytes of the given kind over the payload's payload_len bytes; seq:
    increases with each write; written_at: Unix seconds."""

    namespace: bytes
    record: BlockName
    payload_len: int
    checksum_kind: int
    checksum: bytes
    seq: int
    written_at: int


def checksum(payload: memoryview) -> bytes:
    return xxh3_128_digest(payload)


def page_bytes(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def entry_bytes(block_size: int) -> int:
    """Bytes of a header without padding to pages; a multiple of 8."""
    return HEAD.size + block_size * TOKEN_BYTES + 8


def header_bytes(block_size: int) -> int:
    """Bytes of a header before a payload."""
    return page_bytes(HEAD.size + block_size * TOKEN_BYTES + CRC.size)


def pack(header: RecordHeader, size: int) -> bytes:
    """The header in `size` bytes: header_bytes or entry_bytes of its number of tokens."""
    r = header.record
    assert len(r.key) == len(r.parent) == len(header.namespace) == 32, "digests of a record have 32 bytes"
    assert len(r.uid) == len(r.parent_uid) == len(header.checksum) == 16, "uids of a record have 16 bytes"
    body = HEAD.pack(
        MAGIC,
        VERSION,
        0,
        header.namespace,
        r.key,
        r.parent,
        r.uid,
        r.parent_uid,
        r.depth,
        len(r.tokens) // TOKEN_BYTES,
        header.payload_len,
        header.checksum_kind,
        header.checksum,
        header.seq,
        header.written_at,
    )
    padded = (body + r.tokens).ljust(size - CRC.size, b"\0")
    assert len(padded) == size - CRC.size, f"{len(r.tokens)} bytes of tokens in a header of {size}"
    return padded + CRC.pack(zlib.crc32(padded))


def unpack(raw: bytes | bytearray | memoryview) -> RecordHeader | JobOutcome:
    """Parse a header from exactly these bytes, or return the reason why it is invalid."""
    end = len(raw) - CRC.size
    if bytes(raw[:4]) != MAGIC:
        return JobOutcome.BLANK if not any(raw[:4]) else JobOutcome.HEADER
    if zlib.crc32(memoryview(raw)[:end]) != CRC.unpack_from(raw, end)[0]:
        return JobOutcome.HEADER
    (_, version, flags, namespace, key, parent, uid, parent_uid, depth, num_tokens, payload_len, kind,
     digest, seq, written_at) = HEAD.unpack_from(raw)  # fmt: skip
    if version != VERSION or flags:
        return JobOutcome.VERSION
    stop = HEAD.size + num_tokens * TOKEN_BYTES
    if stop > end:
        return JobOutcome.LENGTH
    record = BlockName(key, parent, uid, parent_uid, depth, bytes(raw[HEAD.size : stop]))
    return RecordHeader(namespace, record, payload_len, kind, digest, seq, written_at)
