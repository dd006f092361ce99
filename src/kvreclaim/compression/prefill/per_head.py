"""MInference: a calibrated pattern for each head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from kvreclaim.checks import parse_json, require
from kvreclaim.compression.prefill.method import SparsePrefill, Tiles
from kvreclaim.compression.prefill.minference import AShape, BlockSparse, VerticalSlash
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.outputs import write_text

FORMAT = "kvreclaim sparse prefill patterns 1"
PATTERNS = {cls.name: cls for cls in (AShape, VerticalSlash, BlockSparse)}


@dataclass(frozen=True)
class Patterns:
    """Calibrated patterns. model: the model's fingerprint; methods: patterns with their options; heads:
    indices into methods, [L][K]."""

    model: str
    methods: tuple[SparsePrefill, ...]
    heads: tuple[tuple[int, ...], ...]

    def save(self, path: str | Path) -> None:
        """Write them as JSON. Raises: InvalidArgumentError."""
        methods = [{"name": method.name, **_own(method)} for method in self.methods]
        content = {"format": FORMAT, "model": self.model, "methods": methods, "heads": self.heads}
        write_text(Path(path), json.dumps(content) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Patterns:
        """Read them from JSON. Raises: InvalidArgumentError for any other file."""
        try:
            content = parse_json(Path(path).read_text(encoding="utf-8"))
            require(content.pop("format") == FORMAT, "it is of another format")
            methods = tuple(PATTERNS[each.pop("name")](**each) for each in content["methods"])
            heads = tuple(tuple(map(int, layer)) for layer in content["heads"])
            require(bool(heads) and all(len(layer) == len(heads[0]) for layer in heads), "layers differ")
            require(all(0 <= n < len(methods) for layer in heads for n in layer), "a head has no pattern")
            return cls(str(content["model"]), methods, heads)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, InvalidArgumentError) as error:
            raise InvalidArgumentError(
                f"{str(path)!r} holds no patterns of heads ({type(error).__name__}: {error}); write it anew "
                "with `kvreclaim calibrate --sparse-prefill FILE`."
            ) from error


def _own(method: SparsePrefill) -> dict[str, int]:
    """Return the options that are specific to a method, and its block."""
    common = SparsePrefill.__dataclass_fields__
    names = [name for name in type(method).__dataclass_fields__ if name not in common]
    return {name: getattr(method, name) for name in (*names, "block")}


@cache
def _patterns(path: str) -> Patterns:
    return Patterns.load(path)


@dataclass(frozen=True)
class MInference(SparsePrefill):
    """Each KV head reads by its best pattern on a calibration text, at about the same number of blocks:
    a_shape, vertical_slash or block_sparse (`kvreclaim calibrate --sparse-prefill`).

    heads: the file of patterns, read once

    Paper: MInference, arXiv 2407.02490, section 3.3 (kernel-aware search).
    """

    name = "minference"

    block: int = 64
    heads: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.heads, str) and bool(self.heads),
            "sparse prefill minference needs a pattern for each head; write minference(heads='FILE'), a file "
            "of `kvreclaim calibrate --sparse-prefill FILE`.",
        )
        blocks = {method.block for method in self.patterns.methods}
        require(
            blocks == {self.block},
            f"sparse prefill minference chooses among blocks of {self.block} tokens, and the patterns in "
            f"{self.heads!r} among {sorted(blocks)}; write block={min(blocks)}.",
        )

    @property
    def namespace(self) -> str:
        return f"{super().namespace} {sha256(repr(self.patterns).encode()).hexdigest()}"

    @property
    def patterns(self) -> Patterns:
        return _patterns(self.heads)

    def tile(self, group_size: int) -> int:
        return self.block

    @property
    def span(self) -> int:
        return max(method.span for method in self.patterns.methods)

    def check(self, facts: ModelFacts, block_size: int) -> None:
        super().check(facts, block_size)
        shape = len(self.patterns.heads), len(self.patterns.heads[0])
        own = facts.num_layers, facts.layers[0].num_kv_heads
        require(
            self.patterns.model == facts.fingerprint and shape == own,
            f"the patterns in {self.heads!r} are those of another model, of {shape[0]} layers with "
            f"{shape[1]} KV heads, not of {facts.name!r} ({own[0]}, {own[1]}); calibrate this one.",
        )

    def choose(self, tiles: Tiles) -> Tensor:
        chosen: Sequence[int] = self.patterns.heads[tiles.layer]
        heads = torch.tensor(chosen, device=tiles.past.device)[:, None]
        kept = torch.zeros_like(tiles.visible)
        for n in sorted(set(chosen)):
            kept |= self.patterns.methods[n].choose(tiles) & (heads == n)
        return kept
