"""Many clients at once, with everything that a client may do: every finished answer must be the one that the
same request gets alone, and in the end every block must be back. Over the second half of the requests another
tenant attacks, and others ask what the server's own description allows: nothing may be answered with a 5xx,
and what the attack did to first tokens is told.

    python scripts/soak.py --requests 1000 --clients 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from soak_cases import MESSAGES, MODEL, Case, Seen, expected, make_cases

from kvreclaim import LLM, demo_model
from kvreclaim.engine.serving.client import EngineClient
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.engine.serving.messages import EngineSpec
from kvreclaim.engine.serving.process import ProcessEngine
from kvreclaim.engine.serving.thread import AsyncEngine
from kvreclaim.server.config import ServerConfig
from kvreclaim.server.metrics.observer import count
from kvreclaim.server.run import Server, bind
from kvreclaim.server.service import Service

TIMEOUT_S = 300.0
LAST_ANSWER_S = 90.0
KEYS = ("key-a", "key-b", "key-c")
OPERATOR = "key-of-the-operator"
ATTACKER = "key-of-the-attacker"
HERE = Path(__file__).parent


@dataclass
class Report:
    """What happened; good if there are no violations."""

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def check(self, case: Case, seen: Seen, llm: LLM) -> None:
        """One case against what it should have been."""
        wrong = seen.problem
        if not wrong and seen.left:
            self.outcomes["left by its client"] += 1
            return
        if not wrong and seen.status != case.status:
            wrong = f"status {seen.status}, not {case.status}"
        if not wrong and case.status == 200:
            wrong = _difference(case, seen, llm)
        if wrong:
            self.violations.append(f"{case.name} {case.path} {json.dumps(case.body)[:300]}: {wrong}")
            return
        kind = "greedy, as alone" if case.greedy else "drawn"
        self.outcomes["refused" if case.status != 200 else f"finished, {kind}"] += 1


def _difference(case: Case, seen: Seen, llm: LLM) -> str | None:
    if not seen.complete:
        return "the answer broke off"
    if not case.greedy:
        return None if all(seen.reasons.values()) else f"ended by {seen.reasons}"
    alone = expected(case, llm)
    for name in ("texts", "reasons", "num_prompt", "num_generated"):
        if getattr(seen, name) != getattr(alone, name):
            return f"{name} {getattr(seen, name)}, alone {getattr(alone, name)}"
    return None


async def ask(client: httpx2.AsyncClient, case: Case) -> Seen:
    """Send one case and read what comes, or leave."""
    seen, begun = Seen(), time.perf_counter()
    headers = {"authorization": f"Bearer {case.key}"} if case.key else {}
    limit = None if case.stream else case.leaves_after
    try:
        async with (
            asyncio.timeout(limit),
            client.stream("POST", case.path, json=case.body, headers=headers) as answer,
        ):
            seen.status = answer.status_code
            if case.stream and seen.status == 200:
                await _read_events(answer, case, seen, begun)
            else:
                _take_whole(json.loads(await answer.aread()), seen)
    except TimeoutError:
        seen.left = True
    except (httpx2.HTTPError, ValueError) as error:
        seen.problem = f"{type(error).__name__}: {error}"
    return seen


async def _read_events(answer: httpx2.Response, case: Case, seen: Seen, begun: float) -> None:
    num_events = 0
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        if case.leaves_after is not None and num_events >= case.leaves_after:
            seen.left = True
            return
        if not num_events:
            seen.first_s = time.perf_counter() - begun
        num_events += 1
        if line == "data: [DONE]":
            seen.complete = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            seen.problem = f"an error event: {event}"
        elif case.path == MESSAGES:
            _take_message_event(event, seen)
        else:
            _take_chunk(event, seen)


def _take_chunk(event: dict[str, Any], seen: Seen) -> None:
    for choice in event["choices"]:
        _add(seen, choice["index"], choice.get("text") or choice.get("delta", {}).get("content") or "")
        if choice["finish_reason"]:
            if seen.reasons.get(choice["index"]):
                seen.problem = "an output ended twice"
            seen.reasons[choice["index"]] = choice["finish_reason"]
    if event.get("usage"):
        _take_usage(event["usage"], seen)


def _take_message_event(event: dict[str, Any], seen: Seen) -> None:
    if event["type"] == "message_start":
        _add(seen, 0, "")
    elif event["type"] == "content_block_delta":
        _add(seen, 0, event["delta"]["text"])
    elif event["type"] == "message_delta":
        seen.reasons[0] = event["delta"]["stop_reason"]
        _take_usage(event["usage"], seen)
    seen.complete = event["type"] == "message_stop"


def _take_whole(answer: dict[str, Any], seen: Seen) -> None:
    if seen.status != 200:
        return
    for choice in answer.get("choices", ()):
        _add(seen, choice["index"], choice["text"] if "text" in choice else choice["message"]["content"])
        seen.reasons[choice["index"]] = choice["finish_reason"]
    if "content" in answer:
        _add(seen, 0, "".join(block["text"] for block in answer["content"]))
        seen.reasons[0] = answer["stop_reason"]
    _take_usage(answer["usage"], seen)
    seen.complete = True


def _add(seen: Seen, index: int, text: str) -> None:
    seen.texts[index] = seen.texts.get(index, "") + text


def _take_usage(usage: dict[str, Any], seen: Seen) -> None:
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    seen.num_prompt = usage.get("prompt_tokens", sum(usage.get(part, 0) for part in parts))
    seen.num_generated = (
        usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]
    )


@asynccontextmanager
async def serving(engine: EngineClient) -> AsyncIterator[str]:
    """A server with keys, in this event loop. Gives: its address."""
    keys = (*KEYS, ATTACKER)
    config = ServerConfig(served_model_name=(MODEL,), api_keys=keys, operator_key=OPERATOR)
    server, listener = Server(Service(engine, config)), bind("127.0.0.1", 0)
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    try:
        yield "http://{}:{}".format(*listener.getsockname()[:2])
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def beside(report: Report, base_url: str, *programs: str) -> AsyncIterator[None]:
    """Programs that go on against the server, each in a process of its own, until the block ends; what they
    print are violations."""
    running = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, HERE / program, base_url, str(os.getpid()), ATTACKER, OPERATOR),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for program in programs
    ]
    try:
        yield
    finally:
        for program, process in zip(programs, running, strict=True):
            try:  # its input ends, and so does it
                said, _ = await asyncio.wait_for(process.communicate(b""), LAST_ANSWER_S)
            except TimeoutError:
                process.kill()
                report.violations.append(f"{program} waited {LAST_ANSWER_S:g} s for its last answer")
                continue
            *problems, did = said.decode().splitlines() or ["it said nothing"]
            report.violations += [f"{program}: {problem}" for problem in problems]
            if process.returncode:
                report.violations.append(f"{program} ended with exit code {process.returncode}")
            report.facts[program] = did


async def soak(
    engine: EngineClient, alone: LLM, cases: list[Case], num_clients: int, programs: tuple[str, ...] = ()
) -> Report:
    """Run the cases, so many clients at once, each of which takes the next case. alone: for the oracle;
    programs: what goes on beside the second half of them."""
    report, begun = Report(), time.perf_counter()
    async with serving(engine) as base_url:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, limits=limits) as client:

            async def answers_to(some: list[Case]) -> list[tuple[Case, Seen]]:
                waiting = iter(some)

                async def one_client() -> list[tuple[Case, Seen]]:
                    return [(case, await ask(client, case)) for case in waiting]

                found = await asyncio.gather(*(one_client() for _ in range(num_clients)))
                return [pair for pairs in found for pair in pairs]

            half = len(cases) // 2
            before = await answers_to(cases[:half])
            async with beside(report, base_url, *programs):
                during = await answers_to(cases[half:])
            elapsed_s = time.perf_counter() - begun
            await asyncio.wait_for(engine.drained(), TIMEOUT_S)
            load = (await client.get("/load", headers={"authorization": f"Bearer {OPERATOR}"})).json()
            await engine.call(EngineCore.check)
            counted = (await engine.call(count)).values
    for name in ("server_load", "blocks_in_use"):
        if load[name]:
            report.violations.append(f"in the end /load says {name} {load[name]}")
    for case, seen in before + during:
        report.check(case, seen, alone)
    report.facts |= {
        "elapsed_s": round(elapsed_s, 2),
        "generated_tokens": counted["vllm:generation_tokens"],
        "preemptions": counted["vllm:num_preemptions"],
        "compactions": counted["kvreclaim:compactions"],
        "first_token_ms": _first_tokens(before),
        "first_token_ms_beside": _first_tokens(during),
        "load": load,
    }
    return report


def _first_tokens(answers: list[tuple[Case, Seen]]) -> dict[str, float]:
    """Of the streams that had one."""
    waits_s = [seen.first_s for _, seen in answers if seen.first_s is not None]
    return {f"p{q}": round(1e3 * float(np.percentile(waits_s, q)), 1) for q in (50, 99)} if waits_s else {}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=4096, help="a few: requests preempt each other")
    parser.add_argument("--no-compression", action="store_true", help="every request keeps its full cache")
    parser.add_argument("--thread", action="store_true", help="the engine in a thread of the server")
    parser.add_argument("--alone", action="store_true", help="no attack, nothing else beside")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("kvreclaim.schedule").setLevel(logging.ERROR)
    spec = EngineSpec(model=str(demo_model()), options={"num_blocks": arguments.blocks, "max_num_seqs": 64})
    engine = AsyncEngine(spec.load()) if arguments.thread else ProcessEngine.launch(spec)
    programs = () if arguments.alone else ("soak_attack.py", "soak_schema.py")
    alone = LLM(demo_model(), num_blocks=4096, max_num_seqs=64)
    cases = make_cases(arguments.seed, arguments.requests, KEYS, compress=not arguments.no_compression)
    report = asyncio.run(soak(engine, alone, cases, arguments.clients, programs))
    print(json.dumps({"outcomes": report.outcomes, **report.facts}, indent=2))
    for violation in report.violations:
        print(f"VIOLATION: {violation}", file=sys.stderr)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
