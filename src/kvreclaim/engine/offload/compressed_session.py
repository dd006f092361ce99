"""Sessions of compressed prefixes: a snapshot to a file and back, between two steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from kvreclaim.checks import require
from kvreclaim.compression.compressor import Compressor
from kvreclaim.config import EngineConfig
from kvreclaim.engine.offload.image import Image, image_of, image_of_parked, moved, renamed
from kvreclaim.engine.offload.image_record import KIND, UnfitError, image_from, record_of
from kvreclaim.engine.offload.offloading import Offload
from kvreclaim.engine.offload.prefixes import is_file_of
from kvreclaim.engine.offload.snapshot_state import SnapshotStore
from kvreclaim.engine.request.snapshot_recipe import PASS_SEMANTICS, VERSION, snapshot_key
from kvreclaim.engine.request.spec import compressing_prompt, footprint_of
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.offload.store.session_file import SessionFile
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.blocks_io import write_blocks
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.schedule.snapshot_key import SnapshotKey

BEYOND = 0
"""A token behind those of a session: a hit leaves one to be computed."""
SALT = "salt"
"""A disk-tier file's field for its salt; the loader of a session names a new one."""


class CompressedSessions:
    """Snapshots of one engine, as files. What is restored lies on the device as if it had just been made."""

    def __init__(
        self,
        store: SnapshotStore,
        memory: MemoryManager,
        cache: KVCache,
        backend: Backend,
        tiers: Offload | None,
        config: EngineConfig,
    ) -> None:
        self.store, self.memory, self.cache, self.backend = store, memory, cache, backend
        self.tiers, self.config = tiers, config

    def key_of(
        self, token_ids: list[int], salt: str | None, compressor: Compressor | None, compress_prompt_at: int
    ) -> SnapshotKey:
        """The key of what compression leaves of such a prompt. Raises: InvalidArgumentError."""
        plain = footprint_of(compressor, self.config, [*token_ids, BEYOND])
        footprint = compressing_prompt(plain, compress_prompt_at, compressor, len(token_ids) + 1)
        assert compressor is not None, "compressing_prompt refuses a place without a policy that evicts"
        return snapshot_key(token_ids[:compress_prompt_at], salt, compressor, footprint)

    def file_of(self, key: SnapshotKey, fields: Mapping[str, str]) -> SessionFile:
        """The file of what is kept under a key, wherever that lies. Raises: InvalidArgumentError if nothing
        is."""
        found = self._on_disk(key)
        if found is None:
            facts, tensors = record_of(self._image(key), key, self.cache)
            found = SessionFile(fields, facts, tensors)
        facts = {name: fact for name, fact in found.facts.items() if name != SALT}
        return SessionFile(fields, facts, found.tensors)

    def _image(self, key: SnapshotKey) -> Image:
        seq = self.store.scheduler.snapshots.get(key)
        if seq is None:
            raise InvalidArgumentError(
                f"nothing is cached of these {key.num_tokens} tokens so compressed; generate with them, this "
                "compression and this compress_prompt_at first, and save before others take the blocks.",
            )
        if self.tiers is not None and self.memory.offload.parking.is_parked(seq.seq_id):
            tiers, parked = self.tiers, self.memory.offload.parking.parked(seq.seq_id)
            aside = tiers.parking.aside(seq.seq_id)
            image = image_of_parked(seq, parked, aside, self.cache, tiers.moves.slots)
        else:
            image = image_of(seq, self.memory, self.cache, self.store.signals)
        return self.store.with_state(seq.seq_id, image)

    def _on_disk(self, key: SnapshotKey) -> SessionFile | None:
        """The file of a snapshot that lies on disk alone."""
        prefixes = None if self.tiers is None else self.tiers.prefixes
        is_above = self.store.scheduler.snapshots.get(key) is not None
        if prefixes is None or is_above or key not in prefixes.below:
            return None
        found = prefixes.files.load(key.name, lambda file: is_file_of(key, file))
        return found if isinstance(found, SessionFile) else None

    def enter(self, file: SessionFile, path: str | os.PathLike[str], salt: str | None) -> int:
        """Let a file's content be a snapshot. Returns: its tokens.

        Raises: InvalidArgumentError for one that this engine has no use for, or no room.
        """
        self._check(file.facts, path)
        try:
            tokens = file.tensors["tokens"]
            if tokens.dtype != torch.int64 or len(tokens) != file.facts["num_tokens"]:
                raise UnfitError("its tokens do not fit")
            image = image_from(file.facts, file.tensors, self.cache, self.store.state_bytes)
            key = SnapshotKey(
                salt,
                str(file.facts["recipe"]),
                tokens.numpy().tobytes(),
                has_past=bool(file.facts["has_past"]),
            )
        except (UnfitError, KeyError) as error:
            raise InvalidArgumentError(
                f"{os.fspath(path)} holds no compressed session of this engine ({error}); save it again.",
                field="filename",
            ) from error
        if self.store.scheduler.snapshots.get(key) is None:
            self._enter(key, image)
        return key.num_tokens

    def _check(self, facts: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
        """Check that this engine makes equal snapshots. Raises: InvalidArgumentError."""
        try:
            recipe = json.loads(facts["recipe"])
            saved = {
                "version": recipe["version"],
                "pass_semantics": recipe["semantics"],
                "max_num_batched_tokens": recipe["footprint"]["max_chunk"],
            }
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{os.fspath(path)} does not say how it was compressed; save it again.", field="filename"
            ) from error
        here = {
            "version": VERSION,
            "pass_semantics": PASS_SEMANTICS,
            "max_num_batched_tokens": self.config.max_num_batched_tokens,
        }
        for name, value in here.items():
            if saved[name] != value:
                raise InvalidArgumentError(
                    f"{os.fspath(path)} was saved with another {name}: {saved[name]}, here it is {value}; "
                    "load it with the settings that it was saved with.",
                    field=name,
                )

    def _enter(self, key: SnapshotKey, image: Image) -> None:
        seq, snapshots = self.store.of_key(key, image.state), self.store.scheduler.snapshots
        seq.keys, seq.account = self.memory.keys(seq.token_ids, key.salt), image.account
        require(
            self.memory.max_idle != 0,
            "a compressed session of a model with recurrent layers takes the state of a checkpoint, but "
            "state_checkpoints is 0; raise it.",
            "state_checkpoints",
        )
        blocks = snapshots.adopt(seq, image.table(seq.keys))
        if blocks is None:
            raise InvalidArgumentError(
                f"the compressed session takes {len(image.blocks)} blocks, but compressed prefixes may have "
                f"{snapshots.max_blocks}, and {self.memory.num_in_use} of {self.memory.pool.num_blocks} are "
                "in use; end some requests, or raise prefix_snapshot_fraction or num_blocks."
            )
        self.store.held[seq.seq_id] = seq
        try:
            self.store.enter_state(seq.seq_id, image)
            self._fill(seq.seq_id, image, blocks)
            seq.state = moved(image.state, self.cache.device)
            if seq.state.cells is not None:
                table = self.memory.table(seq.seq_id).block_ids
                seq.state.cells = renamed(seq.state.cells, image.aside.blocks, table, self.cache)
        except BaseException:
            snapshots.drop(key)
            raise

    def _fill(self, seq_id: int, image: Image, blocks: list[int]) -> None:
        """Write the bytes of blocks and the side state of the sequence."""
        signals = self.store.signals
        self.backend.prepare_blocks(self.cache, blocks)
        write_blocks(self.cache.planes, image.blocks, blocks)
        if image.beside is not None:
            write_blocks(signals.keep_scores().planes, image.beside, blocks)
        signals.resume(seq_id, image.aside.signals)


def is_compressed(file: SessionFile) -> bool:
    return file.facts.get("kind") == KIND
