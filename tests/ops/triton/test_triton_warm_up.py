"""What is compiled at the start is what live steps launch, for each kind of cache and compression."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import tiny
from triton.runtime.interpreter import GridExecutor

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.engine.api.model_engine import ModelEngine
from kvreclaim.engine.api.warm_up import warm_up
from kvreclaim.ops.triton import support

if not support.is_interpreted():
    pytest.skip("looks at what Triton's interpreter is given", allow_module_level=True)

CHOSEN = ("num_warps", "num_stages")
"""Options of a launch that are compiled in."""


@contextmanager
def variants() -> Iterator[set[str]]:
    """Kernels that run in this context, each with its compile-time constants and the types of its tensors."""
    found: set[str] = set()
    launch = GridExecutor.__call__

    def call(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        kinds = {
            name: value if name in self.constexprs or name in CHOSEN else getattr(value, "dtype", type(value))
            for name, value in named.items()
        }
        found.add(f"{self.fn.__name__} {sorted(kinds.items(), key=str)}")
        return launch(self, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", call):
        yield found


@pytest.mark.parametrize(
    ("family", "policy", "options"),
    [
        ("llama", None, {}),
        ("llama", "ada_kv(knorm)", {"kv_cache_dtype": "int4"}),
        ("gemma2", "knorm", {"kv_cache_dtype": "int8"}),
        ("deepseek-v3", "tova", {}),
        ("llama", "snapkv", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
)
def test_live_steps_launch_nothing_new(
    tiny_dir: Callable[[str], Any], family: str, policy: str | None, options: dict[str, Any]
) -> None:
    compression = None
    if policy is not None:
        compression = CompressionConfig(policy, budget=4096, interval=8, sinks=2, recent=6)
    given = {"kernels": "triton", "block_size": 8, "max_num_batched_tokens": 48, **options}
    with LLM(
        tiny_dir(family), dtype="float32", device="cpu", num_blocks=60, compression=compression, **given
    ) as llm:
        before = llm.stats()
        with variants() as warmed:
            warm_up(
                lambda small: ModelEngine(llm.loaded, llm.stats_file, small, None, warms_up=False),
                llm._given_config,
                compression,
                llm.loaded,
            )
        assert llm.stats() == before
        with variants() as live:
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            config = None
            if policy is not None:
                config = CompressionConfig(policy, budget=24, interval=8, sinks=2, recent=6)
            found = llm.generate(tiny.prompts((61, 20), seed=1), params, config)
        assert [out.error for out in found] == [None, None]
        assert (found[0].metrics.compactions > 0) == (policy is not None)
    assert live
    assert live <= warmed, sorted(live - warmed)
