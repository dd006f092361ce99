"""Tables of cells of single steps: what CUDA graphs read, steps without cells, steps that are split."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from launches import counted
from test_applier import output
from test_head_cells import POOL, SETTINGS, Request, Walk, make_layers
from toy_caches import D, K, L, S

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.scheduler.passes import StepMessage
from kvreclaim.integrations.vllm.worker.cells.grid import find_grid
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables, StepCells, StepKind
from kvreclaim.integrations.vllm.worker.cells.limits import TableLimits, refuse_wide_tables, table_bytes
from kvreclaim.integrations.vllm.worker.clocks import HostClock
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.ops.cell_tables import CellTable
from kvreclaim.schedule import EvictionMethod

G = 2


def make_heads(fixed: int | None = None) -> HeadTables:
    return HeadTables(find_grid(CacheViews(make_layers("plain", False), POOL)), 4, 32, fixed)


def a_pass(heads: HeadTables, counts: list[list[int]], num_blocks: int) -> CellTable:
    """Cells 0, 1, ... of some heads."""
    wanted = np.array(counts)
    table = np.zeros((L, K, wanted.max()), dtype=np.int32)
    cells = iter(range(wanted.sum()))
    for at in np.ndindex(wanted.shape):
        table[at][: wanted[at]] = [next(cells) for _ in range(wanted[at])]
    return CellTable(table, wanted, num_blocks, np.zeros((L, K), dtype=np.int64))


def take(
    heads: HeadTables, names: Sequence[str], query_lens: Sequence[int], lengths: Sequence[int]
) -> StepCells | None:
    """A step of these requests; each has blocks of its own."""
    heads.announce(names, lengths)
    return metadata(heads, query_lens, lengths)


def metadata(heads: HeadTables, query_lens: Sequence[int], lengths: Sequence[int]) -> StepCells | None:
    count, width = len(query_lens), -(-max(lengths) // S)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    blocks = torch.arange(count * width, dtype=torch.int32).view(count, width)
    lens = torch.tensor(lengths).int()
    return heads.take(blocks, lens, starts, sum(query_lens), max(query_lens), max(lengths), starts)


def test_queries_are_dealt_to_rows_and_back() -> None:
    """Chunks and single tokens beside each other; what pads a step stays where it is."""
    heads = make_heads()
    heads.put("a", a_pass(heads, [[1, 3], [2, 2]], 2))
    heads.announce(["b", "a", "c"], [3, 17, 9])
    query_lens, padding = (3, 1, 4), 2
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    num_tokens = sum(query_lens) + padding
    step = heads.take(
        torch.ones(3, 4, dtype=torch.int32), torch.tensor([3, 17, 9]).int(), starts, num_tokens, 4, 17
    )
    assert step is not None
    queries = torch.randn(num_tokens, K * G, D)
    rows = step.rows_of(queries)
    assert step.starts.tolist() == [0, 3, 6, 7, 8, 12, 16]
    expected = [queries[starts[n] : starts[n + 1], h * G : (h + 1) * G] for n in range(3) for h in range(K)]
    assert torch.equal(rows[: K * sum(query_lens)], torch.cat(expected))
    answers = torch.zeros(num_tokens, K * G * D)
    step.put_back(rows, answers)
    assert torch.equal(answers.view_as(queries), queries)


def test_buffers_of_graphs_never_move() -> None:
    """Neither in steps nor in captures; made-up requests have as many tokens as a table allows."""
    heads = make_heads(fixed=6 * S)
    seen = set()
    for number, names in enumerate([["x"], ["a", "x"], ["x", "a", "y"], ["y", "x", "a", "z"]]):
        heads.put("a", a_pass(heads, [[1, 2 + number], [1, 1]], 2))
        with heads.capture():
            assert heads.kind is StepKind.CELLS
            captured = metadata(heads, [2] * len(names), [3 * S] * len(names))
        assert captured is not None
        assert captured.max_seq_len == 6 * S
        step = take(
            heads, [*names, "a"][: len(names)] if number else ["a"], [2] * len(names), [2 * S] * len(names)
        )
        assert step is not None
        for each in (captured, step):
            assert each.order is not None
            seen.add(tuple(x.data_ptr() for x in (each.tables, each.lengths, each.starts, each.order)))
    assert len(seen) == 1


def test_graphs_of_mixed_steps_read_the_order_of_every_later_step() -> None:
    """A graph holds the addresses of its capture: 8 rows, 8 tokens, queries of up to 8 tokens. Whatever steps
    are replayed in it, with fewer rows and tokens too, every token's queries and answers stay its own."""
    heads, most = HeadTables(make_heads().grid, 8, 16, 6 * S), 8
    heads.put("a", a_pass(heads, [[1, 3], [2, 2]], 2))
    # vLLM captures a mixed graph with one token per row, and its number of tokens as the longest query.
    with heads.capture():
        rows, order = metadata(heads, [1] * most, [3 * S] * most), metadata(heads, [most], [3 * S])
    assert rows is not None
    assert order is not None
    graph = replace(rows, max_query_len=most, order=order.order)
    steps = {"decode": [1] * most, "mixed": [7, 1], "fewer rows": [3, 2, 3], "fewer tokens": [1, 2]}
    for name, query_lens in [*steps.items(), *reversed(steps.items())]:
        names, num_tokens = "axyzbcde"[: len(query_lens)], sum(query_lens)
        step = take(heads, names, query_lens, [3 * S] * len(query_lens))
        assert step is not None
        queries = torch.randn(most, K * G, D)
        rows, num_rows = graph.rows_of(queries), len(query_lens) * K
        assert torch.equal(rows[: num_tokens * K], step.rows_of(queries[:num_tokens])), name
        assert graph.starts[: num_rows + 1].tolist() == step.starts.tolist(), name
        assert graph.starts[num_rows:].eq(num_tokens * K).all(), name
        assert torch.equal(graph.lengths[:, :num_rows], step.lengths), name
        assert not graph.lengths[:, num_rows:].any(), name
        answers = torch.zeros(most, K * G * D)
        graph.put_back(rows, answers)
        assert torch.equal(answers.view_as(queries), queries), name


@pytest.mark.parametrize("fixed", [None, 6 * S])
def test_who_was_announced_is_in_one_step_alone(fixed: int | None) -> None:
    """A dummy step after a real one has no cells, also where graphs of cells exist."""
    heads = make_heads(fixed)
    assert heads.kind is StepKind.PLAIN
    heads.put("a", a_pass(heads, [[1, 3], [2, 2]], 2))
    for names, kind in (("a", StepKind.CELLS), ("", StepKind.PLAIN), ("b", StepKind.PLAIN)):
        heads.announce(list(names), [17] * len(names))
        assert heads.kind is kind
        assert (metadata(heads, [1], [17]) is not None) is heads.taken is (kind is StepKind.CELLS)
        assert heads.kind is StepKind.PLAIN
        assert metadata(heads, [1], [17]) is None
    heads.forget(["a", "unknown"])
    assert take(heads, ["a"], [1], [17]) is None


def test_longer_requests_read_their_own_table() -> None:
    """A step of a compressed request, one that fits and one that does not: the rows are those of a step of
    the two that fit, over their own tokens."""
    heads = make_heads(fixed=6 * S)
    heads.put("a", a_pass(heads, [[1, 3], [2, 2]], 2))
    names, query_lens, lengths = ["long", "a", "short"], [3, 1, 2], [6 * S + 1, 2 * S + 1, 4 * S]
    heads.announce(names, lengths)
    assert heads.kind is StepKind.SPLIT
    step = metadata(heads, query_lens, lengths)
    assert step is not None
    assert step.tokens is not None
    assert step.tokens.tolist() == [3, 4, 5]
    found = [x.clone() for x in (step.lengths, step.starts, step.tables)]
    queries = torch.randn(3, K * G, D)
    rows = step.rows_of(queries)
    starts = torch.tensor([0, 1, 3]).int()
    width = -(-max(lengths) // S)
    heads.announce(names[1:], lengths[1:])
    assert heads.kind is StepKind.CELLS
    blocks = torch.arange(3 * width, dtype=torch.int32).view(3, width)[1:]
    alone = heads.take(blocks, torch.tensor(lengths[1:]).int(), starts, 3, 2, 4 * S)
    assert alone is not None
    for n, row in np.ndindex(L, 2 * K):
        length = int(alone.lengths[n, row])
        assert length == found[0][n, row]
        assert torch.equal(found[2][n, row, : -(-length // S)], alone.tables[n, row, : -(-length // S)])
    assert found[1].tolist() == alone.starts.tolist()
    assert torch.equal(rows, alone.rows_of(queries))


@pytest.mark.parametrize("longest", [4 * S, 6 * S + 1], ids=["cells", "split"])
def test_tables_of_a_step_are_made_without_a_wait(longest: int) -> None:
    heads = make_heads(fixed=6 * S)
    heads.put("a", a_pass(heads, [[1, 3], [2, 2]], 2))
    blocks, starts = torch.zeros(3, 8, dtype=torch.int32), torch.tensor([0, 3, 4, 6]).int()
    lengths = torch.tensor([longest, 2 * S + 1, 4 * S]).int()
    host_starts, host_lengths = starts.clone(), lengths.numpy()
    with counted() as found:
        heads.announce(["x", "a", "y"], host_lengths)
        step = heads.take(blocks, lengths, starts, 6, 3, longest, torch.from_numpy(host_starts.numpy()))
    assert step is not None
    assert (step.tokens is None) is (longest < 6 * S)
    assert found.total > 10
    assert found.waits.total() == 0, found.waits


def test_a_pass_leaves_a_head_no_more_than_tables_hold() -> None:
    """Heads of very unequal keys, with and without a limit of three blocks."""
    widest = {}
    for limit in (None, 3 * S):
        torch.manual_seed(0)
        layers = make_layers("plain", False)
        settings = replace(SETTINGS, policy="ada_kv(knorm, alpha=0)", sinks=0, recent=1)
        walk = Walk(layers, settings, *(() if limit is None else (9 * S, limit)))
        request = Request("a")
        walk.requests.append(request)
        walk.grow(request, 6 * S)
        for block in request.blocks:  # low norms are kept
            layers[0].cache[block, 0, :, :D] *= 1e-3
        request.tokens[0][0] = [(keys * 1e-3, values) for keys, values in request.tokens[0][0]]
        for _ in range(3):
            walk.compress([request], random.Random(0))
            walk.grow(request, 2 * S)
        walk.check([request])
        widest[limit] = int(walk.heads.held["a"].counts.max())
        assert walk.heads.held["a"].counts.sum() == L * K * 2
    assert widest[None] > 3 == widest[3 * S]


class Deferred(HostClock):
    """Reads no flag, as a GPU's clock in a step."""

    def watch(self, request_ids: Sequence[str], flags: torch.Tensor) -> None:
        assert flags.shape == (len(request_ids),)


@pytest.mark.parametrize(("policy", "waits"), [("shares(knorm)", 1), ("ada_kv(lagkv)", 1), ("knorm", 0)])
@pytest.mark.parametrize("protect_prompt", [False, True])
def test_the_passes_of_a_step_wait_for_the_device_once(policy: str, waits: int, protect_prompt: bool) -> None:
    """First and later passes of three requests of different lengths; with equal heads not even once."""
    walk = Walk(make_layers("plain", False), replace(SETTINGS, policy=policy, protect_prompt=protect_prompt))
    walk.applier.trace, walk.applier.clock = None, Deferred()
    requests = [Request(name) for name in "abc"]
    for grown in ((3 * S, 3 * S + 2, 3 * S + 5), (S, S, S)):
        for request, count in zip(requests, grown, strict=True):
            walk.grow(request, count)
        passes = [replace(walk.plan(each, random.Random(0)), prompt_slots=S) for each in requests]
        if not waits:
            passes = [replace(one, eviction_method=EvictionMethod.COMPACT) for one in passes]
        step = output(*passes)
        step.kvreclaim = StepMessage(tuple(passes), {one.seq_id: walk.settings for one in passes})
        with counted() as found:
            walk.applier.begin(step)
        assert found.waits.total() == waits, found.waits
        for request, one in zip(requests, passes, strict=True):
            walk.free += [block for block in request.blocks if block not in one.target_ids]
            request.blocks, request.length, request.passed = list(one.target_ids), one.keep, True


def test_the_size_of_tables() -> None:
    """An 8B at 1,024 sequences of 131,072 tokens: 17 GB by the longest request, and by what is held."""
    shape = {"num_layers": 32, "num_kv_heads": 8, "block_size": 16, "num_rows": 1024}
    limits = TableLimits.of(budget=2048, most_tokens=2048 + 127 + 2048, max_model_len=131_072)
    assert limits == TableLimits(8 * 2048 + 127 + 2048, 8 * 2048)
    assert table_bytes(num_tokens=131_072, **shape) > 17e9
    assert table_bytes(num_tokens=limits.tokens, **shape) < 3e9
    assert TableLimits.of(budget=2048, most_tokens=None, max_model_len=4096) == TableLimits(4096, None)
    refuse_wide_tables(2 << 30, 8 << 30)
    with pytest.raises(InvalidArgumentError, match=r"take 3\.0 GiB of the 8\.0 GiB .*lower --max-num-seqs"):
        refuse_wide_tables(3 << 30, 8 << 30)
