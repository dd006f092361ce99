"""KV connectors beside compression: exact blocks are stored and loaded, others never."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer, Engine, greedy
from host_connectors import (
    ALL,
    EXAMPLE,
    OFFLOADING,
    SIMPLE,
    Stored,
    counted_loads,
    host_copies,
    several,
    stored,
)
from models import random_prompts
from oracle import BF16, check_logprobs, full_logprobs, passes_of
from vllm.v1.request import Request

SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 32}
CHUNK, NEW, BLOCK = 256, 90, 32


def prompts() -> list[list[int]]:
    """A prompt that fits a step, two with one head, one of its own: all are compressed, but not the last,
    short one."""
    head, first, second, own, brief, short = random_prompts((320, 200, 380, 640, 230, 100), seed=5)
    return [brief, head + first, head + second, own, short]


def others() -> list[list[int]]:
    return random_prompts((500, 400, 450), seed=6)


def make_engine(
    model: Path, compression: dict[str, Any] | None, transfer: dict[str, Any], **more: Any
) -> Engine:
    return Engine(model, compression=compression, kv_transfer_config=transfer, **more)


@pytest.fixture(scope="module", autouse=True)
def on_the_host() -> Iterator[None]:
    """Copies, and hashes of equal blocks that are the same in all engines."""
    with pytest.MonkeyPatch.context() as patch, host_copies():
        patch.setenv("PYTHONHASHSEED", "0")
        yield


@pytest.fixture(scope="module")
def exact(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Blocks that an engine without compression stores of the prompts, each computed in one step, and of its
    answers."""
    transfer = several(tmp_path_factory.mktemp("exact"), *ALL)
    engine = make_engine(tiny_model, None, transfer, num_blocks=200, chunk=2048)
    for batch in (prompts()[:2], prompts()[2:], others()):
        engine.generate(batch, NEW)
    found = stored(engine)
    engine.close()
    return found


@pytest.fixture(
    scope="module",
    params=[("keydiff", (SIMPLE, OFFLOADING)), ("shares(keydiff)", ALL)],
    ids=["equal", "unequal"],
)
def engine(
    request: pytest.FixtureRequest, exact: Stored, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Heads that keep equally many tokens, and unequal ones; the pool is too small for all prompts."""
    policy, names = request.param
    transfer = several(tmp_path_factory.mktemp("stored"), *names)
    engine = make_engine(tiny_model, {**SETTINGS, "policy": policy}, transfer, num_blocks=40, chunk=CHUNK)
    yield engine
    engine.close()


def check(model: Path, answers: list[Answer], inputs: list[list[int]], trace: Any) -> None:
    """Assert that each answer is that of the tokens its passes kept; without passes, of the whole context."""
    for prompt, answer in zip(inputs, answers, strict=True):
        passes = passes_of(trace, answer.request_id)
        if passes:
            check_logprobs(model, prompt, answer.tokens, answer.logprobs, passes)
        else:
            whole = full_logprobs(model, prompt, answer.tokens)
            assert (whole - answer.logprobs).abs().mean() <= BF16


def are_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether blocks hold the same numbers, up to two units in the last place of bf16: they may have been
    computed in chunks of other sizes, whose products round differently on some CPUs (AMX)."""
    found, wanted = (x.contiguous().view(torch.bfloat16).float() for x in (found, wanted))
    unit = torch.finfo(torch.bfloat16).eps
    return torch.allclose(found, wanted, rtol=2 * unit, atol=unit * float(wanted.abs().max()))


def check_stored(engine: Engine, exact: Stored) -> dict[str, int]:
    """Returns: how many of the exact blocks, or files, each connector holds."""
    found = stored(engine)
    common = {name: found[name].keys() & exact[name].keys() for name in found}
    for name, keys in common.items():
        assert all(are_close(found[name][key], exact[name][key]) for key in keys), name
    return {name: len(keys) for name, keys in common.items()}


def check_whole_hits(engine: Engine) -> None:
    """ExampleConnector finds what the files of a prompt of this length hold, or none."""
    connector = engine.scheduler.connector.sub_connectors[0]
    [prompt] = random_prompts([1200], seed=7)
    for num_tokens in (192, 224, 1152):  # the names of the files are all that is looked at
        connector._generate_foldername_debug(torch.tensor(prompt[:num_tokens]), [], create_folder=True)

    def hit(num_tokens: int, num_computed: int = 0, num_preemptions: int = 0) -> int:
        request = Request("whole", prompt[:num_tokens], greedy(9), None)
        request.num_preemptions = num_preemptions
        try:
            return int(connector.get_num_new_matched_tokens(request, num_computed)[0])
        finally:
            engine.scheduler.reclaim.close("whole")

    assert hit(230) == 224
    assert hit(230, num_computed=64) == 160
    assert hit(230, num_computed=224) == 0
    assert hit(230, num_preemptions=1) == 0, "its files would be named by its output tokens, too"
    assert hit(225) == 0, "vLLM finds 192 tokens and would read the files of 224"
    assert hit(1180) == 0, "with a step's tokens beside them they do not fit into the pool"


def test_what_is_stored_is_exact_and_what_is_loaded_answers(
    engine: Engine, exact: Stored, tiny_model: Path
) -> None:
    with engine.traced() as trace:
        first = engine.generate(prompts(), NEW)
        counts = check_stored(engine, exact)
        assert engine.engine.reset_prefix_cache()
        with counted_loads(engine) as loads:
            again = engine.generate(prompts(), NEW)
            whole = [engine.generate([prompt], 20, settings="off")[0] for prompt in prompts()]
        stored(engine)
    assert all(answer.figures["compactions"] > 0 for answer in first[:4])
    assert all(counts[name] >= CHUNK // BLOCK * 2 for name in counts if name != EXAMPLE)
    assert all(answer.cached_tokens >= CHUNK // BLOCK * BLOCK - BLOCK for answer in again[:4])
    if EXAMPLE in counts:
        assert counts[EXAMPLE] >= 2, "the files of a prompt's layers"
        assert loads[EXAMPLE] >= 224
        assert loads[OFFLOADING] > 0
        check_whole_hits(engine)
    else:
        assert loads[SIMPLE] > 0
    check(tiny_model, first, prompts(), trace)
    check(tiny_model, again, prompts(), trace)
    check(tiny_model, whole, prompts(), trace)
    assert engine.is_empty()


def test_aborts_and_preemptions_store_nothing_else(engine: Engine, exact: Stored, tiny_model: Path) -> None:
    """Uncompressed requests beside compressed ones take the pool from them; some end early. One whose prompt
    ExampleConnector holds is preempted."""
    inputs = [*prompts(), *others()]
    names = [engine.add(prompt, NEW) for prompt in inputs]
    long = [inputs[1], *[inputs[0]] * 4]
    plain = [engine.add(prompt, 300, settings="off") for prompt in long]
    steps, resumed = iter(range(10_000)), set()

    def disturb() -> None:
        step = next(steps)
        if step in (3, 6):
            engine.abort([names[5 + step // 6]])
        running = engine.scheduler.running
        resumed.update(each.request_id.partition("-")[0] for each in running if each.num_preemptions)

    with engine.traced() as trace:
        engine.run(after_step=disturb)
        check_stored(engine, exact)
        assert engine.engine.reset_prefix_cache()
        with counted_loads(engine) as loads:
            whole = [engine.generate([prompt], 20, settings="off")[0] for prompt in prompts()]
        stored(engine)
    assert resumed & set(plain[1:])
    assert loads.total() > 0
    check(tiny_model, [engine.answer(name) for name in plain], long, trace)
    check(tiny_model, whole, prompts(), trace)
    assert engine.is_empty()
