"""vLLM's V2 model runner on a CPU, under Triton's interpreter, scheduled both ways: passes, places that other
requests take over, preemption, and that only what attention gets is shortened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interpreted  # before anything that imports Triton

# isort: split
import pytest
import torch
from engines import Answer, Engine
from models import random_prompts
from oracle import Kept, full_logprobs, logprobs_with_drops, passes_of
from v2_steps import Spy, Step, pointers_of, table_of

BLOCK = 32
COMPRESSION = {"policy": "query_mixture", "budget": 96, "interval": 32, "sinks": 4, "recent": 16}
TOLERANCE = 0.03  # mean difference of log-probabilities in bf16; the tiny model's own is about 0.02


@dataclass(frozen=True, slots=True)
class Served:
    """Requests that came one after the other through an engine with two places."""

    prompts: list[list[int]]
    answers: list[Answer]
    kept: list[list[Kept]]
    steps: list[Step]


def distance(model: Path, prompt: list[int], answer: Answer, kept: list[Kept]) -> float:
    wanted = logprobs_with_drops(model, prompt, answer.tokens, kept)
    return float((answer.logprobs - wanted).abs().mean())


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def engine(request: pytest.FixtureRequest, tiny_model: Path, tiny_stats: Path) -> Iterator[Engine]:
    interpreted.use_v2_runner()
    asynchronous = request.param == "asynchronous"
    made = Engine(
        tiny_model,
        compression={**COMPRESSION, "stats": str(tiny_stats)},
        num_blocks=40,
        chunk=128,
        batch=2,
        max_len=512,
        asynchronous=asynchronous,
    )
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert isinstance(made.runner, GPUModelRunner)
    assert (made.core.batch_queue is not None) == asynchronous
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(engine: Engine) -> Served:
    """The third and the fourth request get the places of the first two; the third is not compressed."""
    prompts = random_prompts((300, 100, 70, 40), seed=3)
    lengths = (30, 60, 30, 100)
    settings = ({"budget": 64}, {"policy": "streaming_llm"}, "off", {"policy": "knorm", "budget": 64})
    spy = Spy(engine)
    with engine.traced() as traces:
        names = [
            engine.add(prompt, length, settings=extra)
            for prompt, length, extra in zip(prompts, lengths, settings, strict=True)
        ]
        engine.run()
    del engine.runner.sample_tokens
    answers = [engine.answer(name) for name in names]
    return Served(prompts, answers, [passes_of(traces, name) for name in names], spy.steps)


def test_logprobs_are_those_over_the_tokens_kept(served: Served, tiny_model: Path) -> None:
    assert [len(kept) > 1 for kept in served.kept] == [True, False, False, True]
    assert len(served.kept[1]) == 1
    for prompt, answer, kept in zip(served.prompts, served.answers, served.kept, strict=True):
        assert distance(tiny_model, prompt, answer, kept) <= TOLERANCE
    whole = full_logprobs(tiny_model, served.prompts[0], served.answers[0].tokens)
    assert float((served.answers[0].logprobs - whole).abs().mean()) > 1


def test_attention_gets_shortened_lengths_and_the_sampler_does_not(served: Served) -> None:
    rows = [row for step in served.steps for row in step.rows]
    assert any(row.shift for row in rows)
    for row in rows:
        assert row.logical == row.ends_at
        assert row.physical == row.logical - row.shift
    for step in served.steps:
        assert {row.bound for row in step.rows} == {max(row.physical for row in step.rows)}


def test_new_tokens_go_where_the_scheduler_says(served: Served) -> None:
    for step in served.steps:
        for row in step.rows:
            places = range(row.physical - len(row.slots), row.physical)
            assert row.slots == [row.table[place // BLOCK] * BLOCK + place % BLOCK for place in places]
            assert len(row.table) == -(-row.physical // BLOCK)


def test_a_block_is_appended_in_the_step_of_a_pass(served: Served) -> None:
    """Both are staged writes of one launch: into disjoint parts of the row."""
    first = served.kept[0]
    ends = [kept.num_computed for kept in first if kept.positions.shape[-1] % BLOCK == 0]
    name = served.steps[0].rows[0].name
    seen = [row for step in served.steps for row in step.rows if row.name == name]
    assert any(row.logical - len(row.slots) in ends for row in seen)


def test_another_request_takes_the_place_of_a_compressed_one(served: Served) -> None:
    owners: dict[int, dict[str, int]] = {}
    for step in served.steps:
        for row in step.rows:
            owners.setdefault(row.index, {})[row.name] = row.shift
    in_turn = [list(shifts.values()) for shifts in owners.values()]
    assert any(shift and not later for each in in_turn for shift, later in pairwise(each))


def test_buffers_never_move(served: Served, engine: Engine) -> None:
    assert len({step.pointers for step in served.steps}) == 1
    buffers = engine.runner.input_buffers
    assert {step.logical_pointer for step in served.steps} == {buffers.seq_lens.data_ptr()}
    assert served.steps[0].pointers[0] != buffers.seq_lens.data_ptr()


def test_nothing_is_left(served: Served, engine: Engine) -> None:
    engine.generate([[1, 2, 3]], 1, settings="off")  # a worker learns of a request's end in the next step
    rows = engine.runner.reclaim.rows
    assert engine.scheduler.reclaim.totals.seconds > 0
    assert rows.num_shifted == 0
    assert not rows.host.any()
    assert not rows.device.any()
    assert engine.is_empty()


def test_captures_and_dummy_batches_are_not_shifted(served: Served, engine: Engine, tiny_model: Path) -> None:
    """Dummy batches number their requests 0, 1, …, which are the places of real ones."""
    [prompt] = random_prompts((200,), seed=4)
    with engine.traced() as traces:
        name = engine.add(prompt, 40)
        for _ in range(10):
            engine.step()
        assert engine.runner.reclaim.rows.num_shifted == 1
        for _ in range(3):
            given = captured(engine.runner)
            assert given.seq_lens.tolist() == [1, 1]
            assert pointers_of(given) == served.steps[0].pointers
            engine.worker.execute_dummy_batch()
            engine.step()
        engine.run()
    assert distance(tiny_model, prompt, engine.answer(name), passes_of(traces, name)) <= TOLERANCE


@torch.inference_mode()
def captured(runner: Any) -> Any:
    """The attention metadata that a CUDA graph of two requests would hold."""
    from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

    made = (runner.model_state, runner.input_buffers, runner.block_tables, runner.attn_groups)
    given, _ = prepare_inputs_to_capture(2, 2, *made, runner.kv_cache_config, full_cudagraph=True)
    return next(iter(given.values()))


def test_preempted_requests_come_back(engine: Engine, tiny_model: Path) -> None:
    [prompt] = random_prompts((200,), seed=5)
    with engine.traced() as traces:
        name = engine.add(prompt, 60)
        for _ in range(30):
            engine.step()
        [request] = engine.scheduler.running
        before = len(request.output_token_ids)
        num_passes = len(engine.runner.reclaim.trace.passes)
        assert num_passes > 1
        with engine.counted_preemptions() as preempted:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert len(preempted) == 1
        engine.run()
    answer, kept = engine.answer(name), passes_of(traces, name)
    assert len(kept) > num_passes
    assert kept[num_passes].num_computed < kept[num_passes - 1].num_computed
    wanted = torch.cat(
        [
            logprobs_with_drops(tiny_model, prompt, answer.tokens, kept[:num_passes])[:before],
            logprobs_with_drops(tiny_model, prompt, answer.tokens, kept[num_passes:])[before:],
        ]
    )
    assert float((answer.logprobs - wanted).abs().mean()) <= TOLERANCE
    assert engine.is_empty()


def test_a_pass_that_only_moves_changes_nothing(engine: Engine) -> None:
    """The pass is in a step without tokens, and moves into the same blocks in another order."""
    [prompt] = random_prompts((150,), seed=6)
    [undisturbed] = engine.generate([prompt], 40)
    assert engine.is_empty()
    name = engine.add(prompt, 40)
    for _ in range(20):
        engine.step()
    [request] = engine.scheduler.running
    move_blocks_about(engine, request.request_id)
    engine.run()
    answer = engine.answer(name)
    assert answer.tokens == undisturbed.tokens
    assert torch.equal(answer.logprobs, undisturbed.logprobs)


def move_blocks_about(engine: Engine, request_id: str) -> None:
    """Turn a request's blocks round, in the scheduler's table and by a message to the worker."""
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvreclaim.integrations.vllm.scheduler.passes import StepMessage
    from kvreclaim.schedule import Pass

    record = engine.scheduler.reclaim.records[request_id]
    states, shift = engine.runner.req_states, record.account.num_evicted
    computed = int(states.num_computed_tokens.gpu[states.req_id_to_index[request_id]])
    source = table_of(engine, request_id)
    live = computed - shift
    assert shift
    assert len(source) > 1
    target = source[::-1]
    output = SchedulerOutput.make_empty()
    move = Pass(
        request_id,
        record.footprint.eviction_method,
        tuple(source),
        tuple(target),
        num_tokens=live,
        keep=live,
        logical_len=computed,
        prompt_slots=0,
        first=False,
    )
    small = replace(record.settings, budget=BLOCK)  # less than the request's tokens: all stay
    output.kvreclaim = StepMessage((move,), {request_id: small})
    tables = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    own = {block.block_id: block for block in tables[request_id]}
    tables[request_id][: len(target)] = [own[block] for block in target]
    engine.worker.execute_model(output)


def test_the_runner_of_gpus_can_be_adopted(engine: Engine) -> None:
    """Its class differs from the CPU's; what matters is that Python lets an instance change to ours."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from kvreclaim.integrations.vllm.v0_32 import v2_side

    bare = object.__new__(GPUModelRunner)
    bare.model_state = object.__new__(v2_side.DefaultModelState)
    for _ in range(2):
        v2_side.adopt_v2(bare, engine.runner.reclaim)
    assert type(bare).__mro__[1:3] == (v2_side.V2Hooks, GPUModelRunner)
    assert type(bare.model_state) is v2_side.ReclaimModelState


def test_models_with_attention_metadata_of_their_own_are_refused(engine: Engine) -> None:
    from vllm.v1.worker.gpu.model_states.encoder_only import EncoderOnlyModelState

    from kvreclaim.errors import UnsupportedModelError
    from kvreclaim.integrations.vllm.v0_32 import v2_side

    state = object.__new__(EncoderOnlyModelState)
    runner = SimpleNamespace(model_state=state, model_config=SimpleNamespace(model="some/encoder"))
    with pytest.raises(UnsupportedModelError, match="some/encoder runs with EncoderOnlyModelState in"):
        v2_side.adopt_v2(runner, engine.runner.reclaim)
