"""What the methods of sparse prefill choose, against published numbers and loops over whole logits."""

from __future__ import annotations

import pytest
import torch

from kvreclaim.compression.prefill.method import SparsePrefill, Tiles
from kvreclaim.compression.prefill.minference import AShape, BlockSparse, VerticalSlash
from kvreclaim.compression.prefill.pooled import Pooled
from kvreclaim.compression.prefill.registry import make_method, method_names
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import Softmax
from kvreclaim.ops.kv_cache import KVCache

KEYS = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 3], [-1, 0], [-1, 0], [0.5, 0], [0, 0.5]])
QUERIES = torch.tensor([[2.0, 0.0], [0.0, 1.0]])


def tiles_of(q, keys, lengths, block, first, softmax=None) -> Tiles:
    """Tiles of these lengths, of queries q [T, H, D] that begin at slot `first`, over keys [K, slots, D]."""
    heads, longest = len(keys), max(lengths)
    starts = [first + sum(lengths[:i]) for i in range(len(lengths))]
    ends = torch.tensor([a + n for a, n in zip(starts, lengths, strict=True)])
    index = torch.tensor([[min(a - first + i, len(q) - 1) for i in range(longest)] for a in starts])
    past = torch.tensor(starts) // block
    return Tiles(
        layer=0,
        positions=tuple(starts),
        queries=q[index],
        lengths=torch.tensor(lengths),
        ends=ends[:, None].expand(-1, heads),
        past=past[:, None].expand(-1, heads),
        block=block,
        softmax=softmax or Softmax(q.shape[-1] ** -0.5),
        keys=lambda a, b: keys[:, a:b],
    )


def golden() -> Tiles:
    return tiles_of(QUERIES[:, None], KEYS[None], [2], 2, 6, Softmax(1.0))


@pytest.mark.parametrize(("alpha", "kept"), [(0.2, [True, True, False]), (0.1, [True, True, True])])
def test_pooled_scores_of_the_reference(alpha, kept):
    method = Pooled(alpha=alpha, sinks=0, local=0, block=2)
    scores = method.scores(golden())[0, 0]
    torch.testing.assert_close(scores, torch.tensor([1.1353, 1.1353, 0.1537]), atol=1e-4, rtol=0)
    assert method.choose(golden())[0, 0].tolist() == kept


@pytest.mark.parametrize(
    ("kept", "expected"),
    [([0, 1, 2], (1.5135, 3.1656)), ([0], (1.3545, 3.9884)), ([0, 1], (1.4720, 3.0684))],
)
def test_attention_over_what_is_kept(kept, expected):
    """Through a table of the blocks that are read, then the tile's own."""
    values = torch.arange(8.0).view(1, 4, 1, 2, 1)
    cache = KVCache.plain(KEYS.view(1, 4, 1, 2, 2).clone(), values, (Softmax(1.0),))
    table = torch.tensor([*kept, 3], dtype=torch.int32).numpy()
    batch = AttentionBatch.build((SequenceSlots(table, 2, 2 * len(table)),), 2, torch.device("cpu"))
    found = reference.paged_attention(QUERIES[:, None], cache.layers[0], batch).flatten()
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


class TestLoops:
    """Two KV heads of two query heads each, a chunk of 40 tokens behind 88."""

    first, lengths, block = 88, [16, 16, 8], 8

    @pytest.fixture
    def tiles(self) -> Tiles:
        torch.manual_seed(3)
        q, keys = torch.randn(40, 4, 8) * 2, torch.randn(2, 128, 8)
        return tiles_of(q, keys, self.lengths, self.block, self.first)

    def weights(self, tiles: Tiles) -> torch.Tensor:
        """[T, H, slots] fp64 of dense attention."""
        q = torch.cat([rows[:n] for rows, n in zip(tiles.queries, self.lengths, strict=True)]).double()
        keys = tiles.keys(0, 128).double().repeat_interleave(2, 0)
        logits = torch.einsum("thd,hsd->ths", q, keys) * tiles.softmax.scale
        late = torch.arange(128) > self.first + torch.arange(40)[:, None]
        return logits.masked_fill(late[:, None], -torch.inf).softmax(-1)

    def rows(self, tile: int) -> range:
        return range(sum(self.lengths[:tile]), sum(self.lengths[: tile + 1]))

    def test_pooled_in_pieces_is_pooled(self, tiles, monkeypatch):
        whole = Pooled(alpha=0.5, sinks=0, local=0, block=8).choose(tiles)
        monkeypatch.setattr("kvreclaim.compression.prefill.method.MAX_ELEMENTS", 1)
        tiles.__dict__.pop("means")
        assert torch.equal(Pooled(alpha=0.5, sinks=0, local=0, block=8).choose(tiles), whole)
        assert 0 < whole.sum() < tiles.visible.sum()

    def test_an_a_shape_is_the_first_and_the_last(self, tiles):
        kept = AShape(sinks=9, local=16, block=8).choose(tiles)
        for n, past in enumerate((11, 13, 15)):
            assert kept[n, 0, :past].nonzero().flatten().tolist() == [0, 1, past - 2, past - 1]

    def test_block_sparse_takes_the_blocks_that_the_mean_query_meets(self, tiles):
        kept = BlockSparse(top=4, block=8).choose(tiles) & tiles.visible
        for n, length in enumerate(self.lengths):
            past = int(tiles.past[n, 0])
            for head in range(2):
                means = tiles.keys(0, past * 8)[head].unflatten(0, (past, 8)).mean(1)
                q = tiles.queries[n, :length, 2 * head : 2 * head + 2].mean(0)
                shares = (q @ means.T * tiles.softmax.scale).softmax(-1).sum(0)
                wanted = {*shares.topk(4).indices.tolist(), 0, past - 1}
                assert set(kept[n, head].nonzero().flatten().tolist()) == wanted

    def test_columns_and_diagonals(self, tiles):
        """Sums are of the last queries of a span, over the query heads of a KV head."""
        method = VerticalSlash(vertical=40, slash=24, queries=12, block=8)
        columns, diagonals = method.sums(tiles, tiles.keys(0, 128))
        weights = self.weights(tiles)[-12:].unflatten(1, (2, 2)).sum(2)  # [q, K, slots]
        torch.testing.assert_close(columns.double(), weights.sum(0), atol=1e-5, rtol=0)
        wanted = torch.zeros(2, 128, dtype=torch.float64)
        for i in range(12):
            for slot in range(116 + i + 1):
                wanted[:, 116 + i - slot] += weights[i, :, slot]
        torch.testing.assert_close(diagonals.double(), wanted, atol=1e-5, rtol=0)

    def test_vertical_slash_reads_the_blocks_of_columns_and_distances(self, tiles):
        method = VerticalSlash(vertical=40, slash=112, queries=12, block=8)
        kept = method.choose(tiles) & tiles.visible
        columns, diagonals = method.sums(tiles, tiles.keys(0, 128))
        for head in range(2):
            by_block = columns[head, : 15 * 8].unflatten(0, (15, 8)).sum(-1)
            best = {0, 1, 2, 3} | {4 + int(by_block[4:].argmax())}
            bins = diagonals[head].unflatten(0, (16, 8)).sum(-1)
            near = {*range(13), 13 + int(bins[13:].argmax())}
            for n in range(3):
                start, past = self.first + self.rows(n).start, int(tiles.past[n, head])
                ends = start + self.lengths[n]
                reached = {
                    b
                    for b in range(past)
                    if any((p - s) // 8 in near for p in range(start, ends) for s in range(8 * b, 8 * b + 8))
                }
                wanted = {b for b in best if b < past} | reached
                assert set(kept[n, head].nonzero().flatten().tolist()) == wanted


def test_a_method_is_made_as_it_is_written():
    for name in method_names():
        if name == "minference":
            continue
        method = make_method(name)
        assert isinstance(method, SparsePrefill)
        assert method.name == name
    method = make_method("pooled(first=64, alpha=0.25)")
    assert (method.name, method.first, method.alpha) == ("pooled", 64, 0.25)
    assert make_method("dense") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pooled(0.1)", "is given 0.1; its options, each written option=value"),
        ("pooled(alpha=a(b))", "is given 'alpha'"),
        ("pooled(alpha=0.1, alpha=0.2)", "is given 'alpha' twice"),
        ("pooled(alpha=high)", "alpha is 'high'; pass a number from 0 to 1"),
        ("pooled(block=0)", "option block is 0"),
        ("block_sparse(top=0)", "option top is 0"),
        ("minference(heads='nowhere')", "'nowhere' holds no patterns of heads"),
    ],
)
def test_a_wrong_option_is_one_sentence(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make_method(text)
