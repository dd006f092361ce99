"""--prefill-schedule-interval: prompts held back for steps are compressed between their chunks as well."""

from __future__ import annotations

from pathlib import Path

import vllm
from engines import Engine
from models import random_prompts
from oracle import check_logprobs, passes_of

CASE = {"policy": "keydiff", "budget": 128, "interval": 64, "sinks": 4, "recent": 32}
CHUNK = 128
HELD_ALONE = not vllm.__version__.startswith("0.32.")
"""Without data parallelism vLLM holds prompts back from 0.33 on."""


def test_held_prompts_are_those_of_the_tokens_kept(tiny_model: Path) -> None:
    engine = Engine(
        tiny_model, compression=CASE, num_blocks=24, chunk=CHUNK, max_len=4096, prefill_schedule_interval=3
    )
    short, long = random_prompts((150, 1000), seed=6)
    computed: list[int] = []

    def look() -> None:
        computed.extend(r.num_computed_tokens for r in engine.scheduler.running if r.request_id in inner)

    with engine.traced() as trace:
        names = [engine.add(short, 80)]
        engine.step()
        names.append(engine.add(long, 20))
        inner = {request.request_id for request in engine.scheduler.waiting}
        engine.run(after_step=look)
    in_prompt = [tokens for tokens in computed if 0 < tokens < len(long)]
    assert (len(in_prompt) > len(set(in_prompt))) is HELD_ALONE
    for name, prompt in zip(names, (short, long), strict=True):
        answer = engine.answer(name)
        check_logprobs(tiny_model, prompt, answer.tokens, answer.logprobs, passes_of(trace, name))
    assert engine.is_empty()
    engine.close()
