"""Coded caches of the native back-end hold the reference's codes, wherever tokens are written or moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from unit_rows import bytes_of, unit_rows

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import key_transform, native, reference
from kvreclaim.ops.cells import cell_view, natural_cells
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.kv_cache import KVCache, PagedTokens

CODED = ("fp8_e4m3", "int8", "int4", "turboquant4", "int8+int4")
ISAS = native.supported_isas()
BEST = tuple(isa for isa in ISAS if isa in (ISAS[0], "avx2"))


def each_isa(names: tuple[str, ...]) -> list:
    """(isa, format): every format on the best set and on AVX2, int8 and int4 on the narrowest."""
    pairs = [(isa, name) for isa in BEST for name in names]
    pairs += [(ISAS[-1], name) for name in ("int8", "int4") if ISAS[-1] not in BEST]
    return [pytest.param(isa, name, id=f"{isa}-{name}") for isa, name in pairs]


@pytest.fixture
def on_isa() -> Iterator[Callable[[str], None]]:
    threads = torch.get_num_threads()
    yield native.force_isa
    native.force_isa(ISAS[0])
    torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class Dims:
    k_dim: int = 32
    v_dim: int = 40
    heads: int = 2
    layers: int = 2
    block_size: int = 16
    latent: bool = False

    def allocate(self, backend, name: str, num_blocks: int) -> KVCache:
        dim = self.k_dim + (self.v_dim if self.latent else 0)
        layer = LayerFacts(self.heads, self.heads, dim, self.v_dim, Softmax(1.0), latent=self.latent)
        facts = (layer,) * self.layers
        like = torch.empty(0)
        return backend.allocate(facts, num_blocks, self.block_size, like=like, kv_format=FORMATS[name])

    def tokens(self, rng: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        """k [T, K, D] and v of sizes from 1e-3 to 1e3, channels off centre, some rows of equal numbers."""
        size = torch.exp2(torch.rand(count, self.heads, 1, generator=rng) * 20 - 10)
        k, v = (torch.randn(count, self.heads, dim, generator=rng) for dim in (self.k_dim, self.v_dim))
        k = (k + 2 * torch.randn(self.k_dim, generator=rng)) * size
        v = v * size
        k[torch.rand(count, generator=rng) < 0.03] = 0
        v[torch.rand(count, generator=rng) < 0.03] = -1.5
        return (torch.cat((v, k), -1) if self.latent else k), v


SHAPES = [
    Dims(),
    Dims(8, 8),
    Dims(80, 24, heads=1, block_size=48),
    Dims(64, 128, heads=3, block_size=32),
    Dims(16, 72, heads=1, latent=True),
]


@pytest.mark.parametrize(("isa", "name"), each_isa(CODED))
@pytest.mark.parametrize("dims", SHAPES, ids=lambda d: f"d{d.k_dim} v{d.v_dim} s{d.block_size}")
def test_codes_are_those_of_the_reference(on_isa, isa: str, name: str, dims: Dims) -> None:
    on_isa(isa)
    rng = torch.Generator().manual_seed(dims.k_dim)
    ours, plain = (dims.allocate(backend, name, 7) for backend in (native, reference))
    slots = torch.randperm(7 * dims.block_size, generator=rng)[:70]
    k, v = dims.tokens(rng, 70)
    before = bytes_of(ours, list(range(7)))
    for backend, cache in ((native, ours), (reference, plain)):
        backend.write_kv(cache.layers[dims.layers - 1], k, v, slots)
    where = (slots // dims.block_size, slice(None), slots % dims.block_size)
    for got, want in zip(unit_rows(ours), plain.planes, strict=True):
        off = got[-1][where] != want[-1][where]
        assert off.float().mean() <= (1e-3 if FORMATS[name].is_rotated else 0)
    if dims.layers > 1:
        assert torch.equal(ours.planes[0][:-1].flatten(), before[0][:-1].flatten())
    rest = torch.ones(7, dims.block_size, dtype=torch.bool)
    rest[where[0], where[2]] = False
    for plane in unit_rows(ours):
        assert plane[-1].transpose(1, 2)[rest].eq(0).all()


@pytest.mark.parametrize(("isa", "name"), each_isa(("fp16", *CODED)))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_rows_of_any_strides_and_dtype(on_isa, isa: str, name: str, dtype: torch.dtype) -> None:
    on_isa(isa)
    dims, rng = Dims(layers=1), torch.Generator().manual_seed(1)
    x = torch.randn(2, 24, dims.v_dim * 2, 30, generator=rng).to(dtype)
    k, v = x[:, :, : dims.k_dim * 2 : 2].permute(3, 0, 2, 1)[..., 3], x[0, :2, : dims.v_dim].permute(2, 0, 1)
    caches = [dims.allocate(backend, name, 3) for backend in (native, reference)]
    for backend, cache in zip((native, reference), caches, strict=True):
        backend.write_kv(cache.layers[0], k, v, torch.arange(5, 35))
    ids = torch.arange(3)
    pairs = zip(
        native.gather_tokens(PagedTokens(caches[0].layers[0], ids, 48)),
        reference.gather_tokens(PagedTokens(caches[1].layers[0], ids, 48)),
        strict=True,
    )
    for got, want in pairs:
        assert got.dtype == want.dtype == FORMATS[name].number
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_a_large_cache_takes_no_memory_before_it_is_written(name: str) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = Dims(128).allocate(native, name, 2**29 // Dims(128).allocate(native, name, 1).bytes_per_block)
    held = sum(plane.nbytes for plane in cache.planes)
    assert held > 2**28
    assert process.memory_info().rss - before < held / 8
    assert all(not plane[:, -1].any() for plane in cache.planes)


def test_units_are_as_long_as_their_format_says() -> None:
    for name in CODED:
        for dims in SHAPES:
            cache = dims.allocate(native, name, 3)
            held = sum(plane.nbytes for plane in cache.planes)
            unit = FORMATS[name].unit_bytes(dims.k_dim, dims.v_dim, dims.block_size)
            assert held == 3 * dims.layers * dims.heads * unit
            assert cache.bytes_per_block == held // 3


@pytest.mark.parametrize(
    ("dims", "why"), [(Dims(12), "multiples of 8"), (Dims(block_size=8), "multiple of 16")]
)
def test_refuses_what_has_no_words(dims: Dims, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        dims.allocate(native, "int4", 2)


@dataclass(slots=True, eq=False)
class Walk:
    """Sequences of two caches that live through the same; `tables`: per sequence its blocks and length."""

    dims: Dims
    name: str
    rng: np.random.Generator
    num_blocks: int = 24
    caches: list[KVCache] = field(init=False)
    tables: list[tuple[list[int], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.caches = [
            self.dims.allocate(backend, self.name, self.num_blocks) for backend in (native, reference)
        ]

    def free(self) -> list[int]:
        held = {block for table, _ in self.tables for block in table}
        return self.rng.permutation([b for b in range(self.num_blocks) if b not in held]).tolist()

    def is_shared(self, block: int) -> bool:
        return sum(block in table for table, _ in self.tables) > 1

    def both(self, touched: list[int], call) -> None:
        """Runs call(backend, cache) on both; the native one may only change these blocks."""
        others = [b for b in range(self.num_blocks) if b not in touched]
        before = bytes_of(self.caches[0], others)
        for backend, cache in zip((native, reference), self.caches, strict=True):
            call(backend, cache)
        for got, was in zip(bytes_of(self.caches[0], others), before, strict=True):
            assert torch.equal(got, was)

    def begin(self) -> None:
        self.tables.append(([], 0))

    def append(self, index: int, count: int) -> None:
        table, length = self.tables[index]
        size, free = self.dims.block_size, self.free()
        if len(free) < 2 + count // size:
            return
        if length % size and self.is_shared(table[-1]):
            pair = (table[-1], free.pop())
            self.both([pair[1]], lambda backend, cache: backend.copy_blocks(cache, [pair]))
            table = [*table[:-1], pair[1]]
        needed = -(-(length + count) // size) - len(table)
        table = [*table, *free[:needed]]
        slots = torch.arange(length, length + count)
        mapping = torch.tensor(table)[slots // size] * size + slots % size
        seed = int(self.rng.integers(1 << 30))

        def write(backend, cache: KVCache) -> None:
            rng = torch.Generator().manual_seed(seed)
            for layer in range(self.dims.layers):
                backend.write_kv(cache.layers[layer], *self.dims.tokens(rng, count), mapping)

        self.both(table[length // size :], write)
        self.tables[index] = (table, length + count)

    def fork(self, index: int) -> None:
        table, length = self.tables[index]
        self.tables.append((list(table), length))

    def kept(self, layers: int, heads: int, length: int, count: int) -> Tensor:
        order = self.rng.random((layers, heads, length)).argsort(-1)[..., :count]
        return torch.from_numpy(np.sort(order, -1))

    def compact(self, index: int) -> None:
        table, length = self.tables[index]
        count = int(self.rng.integers(1, length + 1))
        layers, heads = self.rng.choice([1, self.dims.layers]), self.rng.choice([1, self.dims.heads])
        kept, blocks, free = (
            self.kept(layers, heads, length, count),
            -(-count // self.dims.block_size),
            self.free(),
        )
        target = [
            free.pop() if self.is_shared(block) or self.rng.random() < 0.2 else block
            for block in table[:blocks]
            if free
        ]
        if len(target) < blocks:
            return
        if self.rng.random() < 0.2:  # blocks that are still to be read, out of their order
            target = target[::-1]
        ids = torch.tensor(table), torch.tensor(target)
        self.both(target, lambda backend, cache: backend.compact(cache, kept, *ids))
        self.tables[index] = (target, count)

    def compact_unevenly(self, index: int) -> None:
        """Every head keeps a number of its own, in cells; the sequence ends with that."""
        table, length = self.tables[index]
        if any(self.is_shared(block) for block in table):
            return
        views = [cell_view(cache) for cache in self.caches]
        cells = natural_cells(self.caches[0], np.array(table)).reshape(-1, len(table))
        for row in cells:
            ids = torch.from_numpy(row.astype(np.int64))
            count = int(self.rng.integers(1, length + 1))
            kept = self.kept(1, 1, length, count)
            target = ids[: -(-count // self.dims.block_size)]
            for backend, view in zip((native, reference), views, strict=True):
                backend.compact(view, kept, ids, target)
            self.assert_same(views, 0, target, count)
        del self.tables[index]

    def assert_same(self, caches: list[KVCache], layer: int, ids: Tensor, length: int) -> None:
        got, want = (
            backend.gather_tokens(PagedTokens(cache.layers[layer], ids, length))
            for backend, cache in zip((native, reference), caches, strict=True)
        )
        for x, y in zip(got, want, strict=True):
            if FORMATS[self.name].is_rotated:  # sums of another order: single codes may differ
                off = (x - y).abs() > 1e-5 * y.abs() + 1e-6 * y.abs().amax(-1, keepdim=True)
                assert off.any(-1).float().mean() < 0.02
            else:
                assert torch.equal(x, y)

    def check(self) -> None:
        for table, length in self.tables:
            for layer in range(self.dims.layers if length else 0):
                self.assert_same(self.caches, layer, torch.tensor(table), length)

    def step(self) -> None:
        if not self.tables or (len(self.tables) < 3 and self.rng.random() < 0.2):
            self.begin()
        index = int(self.rng.integers(len(self.tables)))
        length = self.tables[index][1]
        choice = self.rng.choice(["append", "append", "fork", "compact", "uneven", "end"])
        if choice == "append" or length == 0:
            self.append(index, int(self.rng.choice([1, 2, 7, 33])))
        elif choice == "fork":
            self.fork(index)
        elif choice == "compact":
            self.compact(index)
        elif choice == "uneven":
            self.compact_unevenly(index)
        elif len(self.tables) > 2:
            del self.tables[index]


@pytest.mark.parametrize(("isa", "name"), each_isa(("fp16", *CODED)))
def test_walk(on_isa, isa: str, name: str) -> None:
    """Writes, forks, copies on write, compactions in place and elsewhere, even and uneven."""
    on_isa(isa)
    for seed, dims in enumerate((Dims(24, 40), Dims(64, 32, heads=3), Dims(16, 40, heads=1, latent=True))):
        torch.set_num_threads(1 + seed % 2)
        walk = Walk(dims, name, np.random.default_rng(seed))
        for _ in range(25):
            walk.step()
            walk.check()


TRANSFORMED = [(1, 2, 7, 64), (5, 3, 1, 80), (70, 2, 4, 128), (3, 1, 2, 96), (2, 2, 2, 256), (9, 5, 3, 24)]
"""T, K, G, D. (70, 2, 4, 128) are several items of the loop over tokens."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "group", "dim"), TRANSFORMED)
@pytest.mark.parametrize("isa", BEST)
def test_transform_rows_as_torch_does(on_isa, threads, isa, tokens, heads, group, dim, dtype) -> None:
    """Sums are in double, rounded once. Centres are a hundred times the keys; any strides; rows alone."""
    on_isa(isa)

    def random(seed: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    rows = random(0, tokens, heads * group, dim).to(dtype)
    factor = random(1, heads, dim).round().exp2().to(dtype)
    offset = random(2, heads, dim).mul(100).to(dtype)
    for count in (None, 0, 1, 4, 6):
        along = [
            None if count is None else random(n, heads, count, dim).div(dim**0.5).to(dtype) for n in (3, 4)
        ]
        for maps in ((factor, offset, *along), (factor, None, *along)):
            found = native.transform_rows(rows, *maps)
            assert (found.dtype, found.is_contiguous()) == (dtype, True)
            exact = key_transform.transform_rows(
                rows.double(), *(None if part is None else part.double() for part in maps)
            )
            sizes = 100.0 if maps[1] is not None else 1.0
            torch.testing.assert_close(
                found.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=1e-5 * sizes
            )
            for strided in (
                rows.transpose(0, 1).contiguous().transpose(0, 1),
                rows.transpose(0, 2).contiguous().transpose(0, 2),
                torch.nn.functional.pad(rows, (8, 8))[..., 8:-8],
            ):
                assert torch.equal(native.transform_rows(strided, *maps), found)
            assert torch.equal(native.transform_rows(rows[-1:], *maps), found[-1:])
            wide = [None if part is None else part.float() for part in maps]
            assert torch.equal(native.transform_rows(rows, *wide), found)


def test_transform_rows_refuses_what_does_not_fit() -> None:
    rows, factor, along = torch.zeros(3, 4, 16), torch.ones(2, 16), torch.zeros(2, 4, 16)
    for bad in (
        (rows, torch.ones(3, 16), None, None, None),
        (rows, factor[:, :8], None, None, None),
        (rows, factor, torch.ones(1, 16), None, None),
        (rows, factor, factor.double(), None, None),
        (rows, factor, None, along, None),
        (rows, factor, None, along, along[:, :3]),
        (rows, factor, None, along.transpose(0, 1), along.transpose(0, 1)),
        (rows[..., :12], factor[:, :12].contiguous(), None, None, None),
        (rows[0], factor, None, None, None),
    ):
        with pytest.raises((ValueError, TypeError)):
            native.transform_rows(*bad)
