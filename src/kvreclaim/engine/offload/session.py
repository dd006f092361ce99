"""Sessions: save the cached blocks of a prompt to a file, and load them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor
from kvreclaim.engine.offload.compressed_session import BEYOND, CompressedSessions, is_compressed
from kvreclaim.engine.offload.offloading import Offload
from kvreclaim.engine.offload.states import NAME, StateCopies
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.prefix.index import BlockKeys
from kvreclaim.offload.store.session_file import SessionFile
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.blocks_io import bytes_per_block, read_blocks, write_blocks
from kvreclaim.ops.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """num_tokens: that need not be computed again; num_bytes: of the file."""

    num_tokens: int
    num_bytes: int


class Sessions:
    """Exact prefixes of one engine, and compressed ones, as files. What is restored is cached as if it had
    just been computed."""

    def __init__(
        self,
        memory: MemoryManager,
        cache: KVCache,
        backend: Backend,
        tiers: Offload | None,
        fields: Mapping[str, str],
        compressed: CompressedSessions,
        states: StateCopies | None,
    ) -> None:
        self.compressed, self.states = compressed, states
        self.memory, self.cache, self.backend, self.tiers = memory, cache, backend, tiers
        self.fields = fields

    def save(self, token_ids: Sequence[int], path: str | os.PathLike[str], salt: str | None) -> SessionInfo:
        """The full blocks of these tokens' beginning that are cached, wherever.

        Raises: InvalidArgumentError if there are none, OSError.
        """
        keys = self.memory.keys([*token_ids, BEYOND], salt)
        tensors = self._cached(keys)
        if not len(blocks := tensors["blocks"]):
            raise InvalidArgumentError(
                f"nothing of these {len(token_ids)} tokens is cached; generate with them first, and save "
                "before others have taken their blocks.",
            )
        num_tokens = len(blocks) * self.memory.block_size
        tensors["tokens"] = torch.tensor(token_ids[:num_tokens], dtype=torch.int64)
        facts = {"kind": "exact", "num_tokens": num_tokens}
        file = SessionFile(self.fields, facts, tensors)
        return SessionInfo(num_tokens, file.save(path))

    def save_compressed(
        self,
        token_ids: list[int],
        path: str | os.PathLike[str],
        salt: str | None,
        compressor: Compressor | None,
        compress_prompt_at: int,
    ) -> SessionInfo:
        """Save what compression has left of these tokens at this place, wherever it lies.

        Raises: InvalidArgumentError if there is nothing, OSError.
        """
        key = self.compressed.key_of(token_ids, salt, compressor, compress_prompt_at)
        return SessionInfo(key.num_tokens, self.compressed.file_of(key, self.fields).save(path))

    def load(self, path: str | os.PathLike[str], salt: str | None) -> SessionInfo:
        """Check the file, then add its tokens to the prefix cache.

        Raises: InvalidArgumentError for a file that does not fit, or without enough room; OSError.
        """
        file = SessionFile.load(path, self.fields)
        if is_compressed(file):
            return SessionInfo(self.compressed.enter(file, path, salt), os.stat(path).st_size)
        tokens, blocks = _parts(file, self.memory.block_size, bytes_per_block(self.cache.planes), path)
        row = None if self.states is None else self.states.check(file, path)
        self._enter(self.memory.keys([*tokens, BEYOND], salt), blocks, row)
        return SessionInfo(len(tokens), os.stat(path).st_size)

    def _cached(self, keys: BlockKeys) -> dict[str, Tensor]:
        """blocks: [n, bytes_per_block] of the longest run that is cached; and the state at its end, if the
        model has recurrent layers."""
        if self.tiers is not None:
            self.tiers.bring_up(keys)
        match = self.memory.match_prefix(keys)
        found = read_blocks(self.cache.planes, match.block_ids)
        if self.tiers is not None and match.lower:
            lower, _ = self.tiers.moves.slots.rows([entry.block for entry in match.lower])
            found = torch.cat([found, lower])
        tensors = {"blocks": found}
        if self.states is not None and len(found):
            tensors[NAME] = self.states.of_match(match)
        return tensors

    def _enter(self, keys: BlockKeys, blocks: Tensor, state: Tensor | None) -> None:
        """Enter the blocks, and the state at their end, as a sequence that is computed at once and ends."""
        memory, size, seq_id = self.memory, self.memory.block_size, SESSION
        match = memory.match_prefix(keys)
        missing = len(blocks) - len(match.entries)
        if missing > memory.num_spare(match):
            raise InvalidArgumentError(
                f"the session takes {missing} blocks, but {memory.num_spare(match)} of "
                f"{memory.pool.num_blocks} can be had now; end some requests, or give the pool more blocks."
            )
        memory.admit(seq_id, match)
        try:
            held = match.num_tokens // size
            growth = memory.grow(seq_id, (len(blocks) - held) * size)
            if self.tiers is not None:
                self.tiers.load_now()
            if growth.new_blocks:
                self.backend.prepare_blocks(self.cache, list(growth.new_blocks))
                write_blocks(self.cache.planes, blocks[held:], growth.new_blocks)
            if self.states is not None and state is not None:
                self.states.enter(seq_id, state)
            memory.release_copy_sources()
            memory.commit(seq_id, (len(blocks) - held) * size)
            if self.tiers is not None:
                self.tiers.store()
        except BaseException:
            memory.invalidate(seq_id)
            raise
        finally:
            memory.free(seq_id)


SESSION = -1
"""Id of the sequence as which a session is entered; no request's has it."""


def _parts(file: SessionFile, size: int, length: int, path: Any) -> tuple[list[int], Tensor]:
    tokens, blocks = file.tensors.get("tokens"), file.tensors.get("blocks")
    good = (
        file.facts.get("kind") == "exact"
        and tokens is not None
        and blocks is not None
        and tokens.dtype == torch.int64
        and blocks.dtype == torch.uint8
        and tokens.dim() == 1
        and tuple(blocks.shape) == (len(tokens) // size, length)
        and len(tokens) % size == 0
    )
    if not good or tokens is None or blocks is None:
        raise InvalidArgumentError(
            f"{path} holds no exact session of this engine; save it again.", field="filename"
        )
    return tokens.tolist(), blocks
