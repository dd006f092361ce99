"""FlashAttention 3 over the pool: a call of the published signature gives what the definition gives. A trial
takes it only where it agrees with the Triton kernels and is faster."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch
from column_sums_oracle import random_positions
from flash_oracle import Calls, flash_attn_with_kvcache
from format_fill import Rig, facts_of, fill
from paged_oracle import Ask, Shape, World, assert_equal, expected, under, world
from test_triton_capture import captured
from torch import Tensor

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.engine.execute.graphs import DecodeGraphs, GraphKind
from kvreclaim.engine.step import assembly
from kvreclaim.ops import reference
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.backend import Choice, Need
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.cells import cell_layers, natural_cells
from kvreclaim.ops.facts import Softmax
from kvreclaim.ops.formats import FORMATS, plain_format
from kvreclaim.ops.triton import flash_trial
from kvreclaim.ops.triton.flash import FlashAttention

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    Shape(kv_heads=2, group=4, dim=64, dtype=BF16),
    Shape(kv_heads=3, group=1, dim=32, block_size=4, dtype=FP16),
    Shape(kv_heads=1, group=7, dim=40, v_dim=24, block_size=8, dtype=BF16),
]
HOW = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "window": {"window": 7},
    "wide window": {"window": 900},
    "all": {"softcap": 4.0, "window": 20, "scale": 0.7},
}
MIXED = [Ask(1, 66), Ask(0, 0), Ask(20, 20), Ask(1, 1), Ask(6, 38, shift=5), Ask(0, 20), Ask(2, 70)]
ALL_HOW = pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=str)


def over(calls: Callable[..., Tensor], *kv_heads: int) -> FlashAttention:
    return FlashAttention(kernels, calls, dict.fromkeys(kv_heads, "some heads"))


def close(got: Tensor, want: Tensor) -> None:
    if got.dtype == FP16:
        torch.testing.assert_close(got.double(), want, atol=1e-3, rtol=2**-10)
    else:
        assert_equal(got, want)


@ALL_HOW
@ALL_SHAPES
def test_any_number_of_queries(shape: Shape, how: dict) -> None:
    w, calls = world(shape, MIXED), Calls(flash_attn_with_kvcache)
    layer = under(w.cache, 0, **{"scale": shape.dim**-0.5, **how})
    close(over(calls, shape.kv_heads).paged_attention(w.q[0], layer, w.batch), expected(w, **how))
    assert len(calls.made) == 1


def by_head(w: World) -> tuple[Tensor, AttentionBatch]:
    """The queries of layer 0 and a batch over cells: a sequence for each KV head of each sequence."""
    tables = [natural_cells(w.cache, seq.block_ids)[0] for seq in w.batch.sequences]
    rows = [
        SequenceSlots(cells, seq.query_len, seq.seq_len, seq.shift)
        for seq, own in zip(w.batch.sequences, tables, strict=True)
        for cells in own
    ]
    batch = AttentionBatch.build(tuple(rows), w.shape.block_size, torch.device("cpu"))
    return w.q[0].unflatten(1, (w.shape.kv_heads, -1)).flatten(0, 1), batch


@ALL_HOW
@ALL_SHAPES
def test_decode_steps_over_heads_and_over_cells(shape: Shape, how: dict) -> None:
    w, calls = world(shape, [Ask(1, n) for n in (1, 16, 40, 71)]), Calls(flash_attn_with_kvcache)
    ops, softmax = over(calls, shape.kv_heads, 1), Softmax(**{"scale": shape.dim**-0.5, **how})
    q, batch = by_head(w)
    steps = [(w.q[0], w.batch, w.cache.layers[0]), (q, batch, cell_layers(w.cache)[0])]
    for queries, own, layer in steps:
        arrays = own.arrays
        lengths, limits = torch.cat((arrays.seq_lens, torch.zeros(2).int())), {"max_seq_len": 80}
        table = torch.cat((arrays.block_table, torch.full_like(arrays.block_table[:1], 9).repeat(2, 1)))
        tables = ops.static_tables(table, lengths, lengths * 0, num_kv_heads=1, **limits)
        padded = torch.cat((queries, queries[:1].repeat(2, 1, 1)))
        got = ops.decode_attention(padded, replace(layer, softmax=softmax), tables)
        assert not got[-2:].any(), "rows of empty sequences are zero"
        close(got[:-2].reshape(w.q[0].shape[0], shape.heads, -1), expected(w, **how))
    assert len(calls.made) == 2


def test_a_latent_cache_takes_two_queries() -> None:
    """MLA: the rotary dims are keys, the latent is both key and value."""
    shape = Shape(kv_heads=1, group=5, dim=48, v_dim=32, latent=True, dtype=BF16)
    w = fill(Rig(reference, FORMATS["bf16"], BF16), shape, [Ask(1, 35), Ask(4, 18), Ask(0, 5)])
    calls = Calls(flash_attn_with_kvcache)
    close(
        over(calls, 1).paged_attention(w.q[0], under(w.cache, 0, scale=0.2), w.batch), expected(w, scale=0.2)
    )
    assert calls.made[0]["qv"].shape[-1] == 32


def test_what_stays_with_triton() -> None:
    """Sinks, other numbers of heads, and windows over slots with positions of their own."""
    shape = Shape(kv_heads=2, group=2, dim=32, dtype=BF16)
    positions = random_positions(1, shape, 25, 9)
    w, calls = world(shape, [Ask(1, 30, shift=9, slot_positions=positions)]), Calls(flash_attn_with_kvcache)
    ops = over(calls, 2)
    for how in ({"sinks": torch.zeros(4)}, {"window": 5}):
        layer = under(w.cache, 0, scale=0.2, **how)
        assert_equal(ops.paged_attention(w.q[0], layer, w.batch), expected(w, scale=0.2, **how))
    over(calls, 1).paged_attention(w.q[0], under(w.cache, 0, scale=0.2), w.batch)
    assert calls.made == []
    ops.paged_attention(w.q[0], under(w.cache, 0, scale=0.2), w.batch)  # positions without a window
    assert len(calls.made) == 1


def test_arguments_are_those_of_the_published_signature() -> None:
    published = inspect.signature(flash_attn_with_kvcache)
    w, calls = world(SHAPES[0], MIXED), Calls(flash_attn_with_kvcache)
    over(calls, 2).paged_attention(w.q[0], under(w.cache, 0, scale=0.1), w.batch)
    (given,) = calls.made
    published.bind(**given)
    assert given["k_cache"].data_ptr() == w.cache.planes[0].data_ptr(), "the pool is read where it lies"
    assert given["k_cache"].shape == (w.cache.num_blocks, 16, 2, 64)


def noise(*args: Any, **kwargs: Any) -> Tensor:
    return torch.randn_like(flash_attn_with_kvcache(*args, **kwargs))


def noise_of_one_head(*args: Any, **kwargs: Any) -> Tensor:
    return (noise if kwargs["k_cache"].shape[2] == 1 else flash_attn_with_kvcache)(*args, **kwargs)


def without_window(*args: Any, **kwargs: Any) -> Tensor:
    return flash_attn_with_kvcache(*args, **{**kwargs, "window_size": (-1, -1)})


def refusing(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("FlashAttention only supports Hopper\nand more lines")


def of_another_signature(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    return q


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    """Installs a function as FlashAttention 3 on a GPU on which it takes `seconds`, Triton one."""

    def install(flash: Callable[..., Tensor], seconds: float = 0.5) -> Calls:
        module, calls = ModuleType(flash_trial.MODULE), Calls(flash)
        module.__spec__, module.flash_attn_with_kvcache = ModuleSpec(flash_trial.MODULE, None), calls  # type: ignore[attr-defined]

        def timed(run: Any) -> float:
            run()
            return seconds if isinstance(run.args[0], FlashAttention) else 1.0

        monkeypatch.setitem(sys.modules, flash_trial.MODULE, module)
        monkeypatch.setattr(flash_trial, "is_hopper", lambda device: True)
        monkeypatch.setattr(flash_trial, "graph_seconds", timed)
        monkeypatch.setattr(flash_trial, "ROWS", 4)
        monkeypatch.setattr(flash_trial, "CACHE_BYTES", 60_000)
        return calls

    return install


def need(shape: Shape, **softmax: Any) -> Need:
    layers = tuple(replace(own, softmax=Softmax(0.2, **softmax)) for own in facts_of(shape))
    return Need(layers, 16, shape.dtype, torch.device("cpu"), plain_format(shape.dtype))


SMALL = Shape(kv_heads=2, group=2, dim=16, dtype=BF16)


@pytest.mark.parametrize("how", [{}, {"window": 4096, "softcap": 3.0}], ids=["plain", "window, softcap"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_what_agrees_and_is_faster_is_taken(installed, dtype: torch.dtype, how: dict) -> None:
    calls = installed(flash_attn_with_kvcache)
    taken: Any = flash_trial.with_flash(kernels, need(replace(SMALL, dtype=dtype), **how))
    assert taken.served == {2: "equal heads", 1: "unequal heads"}
    assert Choice(taken).describe().endswith("FlashAttention 3 for equal heads and unequal heads")
    assert len(calls.made) == 6, (
        "a decode step and a mixed one that are compared, and one that is timed, of each"
    )
    one = flash_trial.with_flash(kernels, need(replace(SMALL, kv_heads=1, dtype=dtype), **how))
    assert one.served == {1: "all heads"}


@pytest.mark.parametrize(
    ("flash", "how", "reason"),
    [
        (noise, {}, "equal heads: its results differ"),
        (without_window, {"window": 9}, "equal heads: its results differ"),
        (refusing, {}, "RuntimeError: FlashAttention only supports Hopper"),
        (of_another_signature, {}, "TypeError: of_another_signature() got an unexpected keyword"),
    ],
)
def test_what_is_wrong_is_not_taken(installed, caplog, flash: Any, how: dict, reason: str) -> None:
    installed(flash)
    assert flash_trial.with_flash(kernels, need(SMALL, **how)) is kernels
    assert sum(reason in record.getMessage() for record in caplog.records) >= 1
    assert all("and more lines" not in record.getMessage() for record in caplog.records)


def test_each_kind_of_heads_is_tried(installed, caplog) -> None:
    installed(noise_of_one_head)
    taken: Any = flash_trial.with_flash(kernels, need(SMALL))
    assert taken.served == {2: "equal heads"}
    assert "for unequal heads: its results differ" in caplog.text


def test_what_is_slower_is_not_taken(installed, caplog) -> None:
    installed(flash_attn_with_kvcache, seconds=2.0)
    with caplog.at_level(logging.INFO):
        assert flash_trial.with_flash(kernels, need(SMALL)) is kernels
    assert "equal heads: FlashAttention 3 2000000.0 us, Triton 1000000.0 us" in caplog.text


def test_what_is_not_tried(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with sinks, fp32, coded caches, other GPUs, and machines without the module."""
    calls = installed(flash_attn_with_kvcache)
    others = [
        need(SMALL, sinks=torch.zeros(4)),
        need(replace(SMALL, dtype=torch.float32)),
        replace(need(SMALL), kv_format=FORMATS["int8"]),
        replace(need(SMALL), kv_format=FORMATS["fp16"]),
    ]
    assert all(flash_trial.with_flash(kernels, each) is kernels for each in others)
    monkeypatch.undo()
    assert not flash_trial.is_hopper(torch.device("cpu"))
    assert flash_trial.with_flash(kernels, need(SMALL)) is kernels
    monkeypatch.setattr(flash_trial, "is_hopper", lambda device: True)
    assert flash_trial.with_flash(kernels, need(SMALL)) is kernels, "the module is not there"
    assert calls.made == []


@pytest.fixture
def auto_is_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "choose_backend", lambda name, need: Choice(kernels))


@pytest.mark.parametrize("policy", ["knorm", "ada_kv(knorm)"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_engine_answers_as_on_the_reference(
    tiny_dir, installed, monkeypatch: pytest.MonkeyPatch, family: str, policy: str
) -> None:
    found = []
    for names in ("reference", "auto"):
        calls = installed(flash_attn_with_kvcache)
        if names == "auto":
            monkeypatch.setattr(assembly, "choose_backend", lambda name, need: Choice(kernels))
        llm = LLM(tiny_dir(family), dtype="float16", device="cpu", num_blocks=40, kernels=names, block_size=8)
        assert ("FlashAttention 3 for equal heads and unequal heads" in llm.engine.kernels) == (
            names == "auto"
        )
        del calls.made[:]
        config = CompressionConfig(policy, budget=24, interval=8, sinks=2, recent=6)
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
        outputs = llm.generate(tiny.prompts((33, 9), seed=1), params, config)
        assert [out.error for out in outputs] == [None, None]
        assert outputs[0].metrics.compactions > 0
        found.append([out.outputs[0].token_ids for out in outputs])
    assert found[0] == found[1]
    heads = {call["k_cache"].shape[2] for call in calls.made}
    assert heads == ({1, 2} if policy == "ada_kv(knorm)" else {2})


@pytest.mark.parametrize("unequal", [False, True])
def test_a_decode_step_can_be_captured(tiny_dir, installed, auto_is_triton: None, unequal: bool) -> None:
    calls = installed(flash_attn_with_kvcache)
    engine = LLM(tiny_dir("llama"), dtype="bfloat16", device="cpu", num_blocks=40, max_model_len=64).engine
    del calls.made[:]
    limits = {"max_num_seqs": 2, "max_model_len": 64, "max_chunk": 64}
    graphs = DecodeGraphs(
        engine.loaded.model, engine.cache, engine.backend, engine.groups, **limits, capture=captured
    )
    with torch.inference_mode():
        assert graphs._prepare(2, GraphKind(unequal)) is None
    assert {len(call["cache_seqlens"]) for call in calls.made} == {4 if unequal else 2}


def test_kernels_triton_and_a_cpu_import_nothing_of_it(tiny_dir) -> None:
    code = (
        "import sys; from kvreclaim import LLM\n"
        f"LLM({str(tiny_dir('llama'))!r}, dtype='float16', num_blocks=8, kernels=sys.argv[1], device='cpu')\n"
        "print([name for name in sys.modules if 'flash' in name and name.startswith(('kvreclaim', 'flash'))])"
    )
    for names in ("auto", "triton"):
        done = subprocess.run([sys.executable, "-c", code, names], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"
