"""Every way to run an engine closes it at the end, so that pending writes to disk arrive."""

from __future__ import annotations

import asyncio
import socket

import pytest
import tiny

from kvreclaim import SamplingParams
from kvreclaim.engine.serving.channel import Channel
from kvreclaim.engine.serving.client import AsyncEngine
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.engine.serving.core_process import EngineCoreProc
from kvreclaim.engine.serving.messages import Stop
from kvreclaim.errors import InvalidArgumentError

GIB = 2**30


@pytest.fixture
def llm(tmp_path, make_llm):
    """Some blocks are on their way to disk."""
    sizes = {"kv_offloading_size": 16e6 / GIB, "kv_offloading_disk_size": 32e6 / GIB}
    llm = make_llm(kv_offloading_disk_path=str(tmp_path), **sizes)
    llm.generate(tiny.prompts((150, 97), seed=4), SamplingParams(max_tokens=4))
    return llm


def test_a_setting_that_a_feature_refuses_is_refused_before_storage_is_taken(tmp_path, make_llm):
    sizes = {"kv_offloading_size": 16e6 / GIB, "kv_offloading_disk_size": 32e6 / GIB}
    with pytest.raises(InvalidArgumentError, match="vertical_slash"):
        make_llm(sparse_prefill="vertical_slash", kv_offloading_disk_path=str(tmp_path), **sizes)
    assert not list(tmp_path.iterdir())


def assert_closed(llm):
    disk = llm.engine.tiers.disk
    assert not disk.close.alive
    assert not disk.workers.num_unfinished
    assert disk.counters.stores == disk.tier.num_storing + disk.tier.num_stored >= 15


def test_the_thread_closes_it(llm):
    async def main():
        engine = AsyncEngine(llm)
        engine.start()
        await engine.stop()

    asyncio.run(main())
    assert_closed(llm)


@pytest.mark.parametrize("stops", [True, False])
def test_the_process_closes_it(llm, stops):
    """After a Stop message, or when the server has closed its end of the channel."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    if stops:
        channel.send(Stop())
        channel.flush()
    else:
        channel.close()
    child = EngineCoreProc(Channel(theirs), EngineCore(llm))
    child.run()
    for end in (ours, theirs, child._woken, child._waker):
        end.close()
    assert_closed(llm)


def test_closing_twice_is_closing_once(llm):
    llm.close()
    llm.close()
    assert_closed(llm)
