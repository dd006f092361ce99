"""Many clients at once, with everything that a client may do: every finished answer must be the one that the
same request gets alone, and in the end every block must be back.

    python scripts/soak.py --requests 1000 --clients 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx2
from soak_cases import MESSAGES, MODEL, Case, Seen, expected, make_cases

from kvreclaim import LLM, demo_model
from kvreclaim.engine.serving.thread import AsyncEngine
from kvreclaim.server.config import ServerConfig
from kvreclaim.server.run import Server, bind
from kvreclaim.server.service import Service

TIMEOUT_S = 300.0
KEYS = ("key-a", "key-b", "key-c")
OPERATOR = "key-of-the-operator"


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
    seen = Seen()
    headers = {"authorization": f"Bearer {case.key}"} if case.key else {}
    limit = None if case.stream else case.leaves_after
    try:
        async with (
            asyncio.timeout(limit),
            client.stream("POST", case.path, json=case.body, headers=headers) as answer,
        ):
            seen.status = answer.status_code
            if case.stream and seen.status == 200:
                await _read_events(answer, case, seen)
            else:
                _take_whole(json.loads(await answer.aread()), seen)
    except TimeoutError:
        seen.left = True
    except (httpx2.HTTPError, ValueError) as error:
        seen.problem = f"{type(error).__name__}: {error}"
    return seen


async def _read_events(answer: httpx2.Response, case: Case, seen: Seen) -> None:
    num_events = 0
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        if case.leaves_after is not None and num_events >= case.leaves_after:
            seen.left = True
            return
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
async def serving(llm: LLM) -> AsyncIterator[tuple[str, Service]]:
    """A server with keys, in this event loop."""
    service = Service(
        AsyncEngine(llm),
        ServerConfig(served_model_name=(MODEL,), api_keys=KEYS, operator_key=OPERATOR),
    )
    server, listener = Server(service), bind("127.0.0.1", 0)
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    try:
        yield "http://{}:{}".format(*listener.getsockname()[:2]), service
    finally:
        server.should_exit = True
        await task


async def soak(llm: LLM, alone: LLM, cases: list[Case], num_clients: int) -> Report:
    """Run the cases, so many clients at once, each of which takes the next case. alone: for the oracle."""
    report, begun = Report(), time.perf_counter()
    waiting = iter(cases)
    async with serving(llm) as (base_url, service):
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, limits=limits) as client:

            async def one_client() -> list[tuple[Case, Seen]]:
                return [(case, await ask(client, case)) for case in waiting]

            answers = await asyncio.gather(*(one_client() for _ in range(num_clients)))
            elapsed_s = time.perf_counter() - begun
            await asyncio.wait_for(service.engine.drained(), TIMEOUT_S)
            load = (await client.get("/load", headers={"authorization": f"Bearer {OPERATOR}"})).json()
            await service.engine.call(lambda host: host.engine.memory.check())
    for name in ("server_load", "blocks_in_use"):
        if load[name]:
            report.violations.append(f"in the end /load says {name} {load[name]}")
    for case, seen in (pair for pairs in answers for pair in pairs):
        report.check(case, seen, alone)
    totals = llm.engine.totals
    report.facts = {
        "elapsed_s": round(elapsed_s, 2),
        "generated_tokens": totals.generation_tokens,
        "preemptions": sum(totals.preemptions.values()),
        "compactions": totals.compactions,
        "compactions_postponed": totals.compactions_postponed,
        "load": load,
    }
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=4096, help="a few: requests preempt each other")
    parser.add_argument(
        "--no-compression", action="store_true", help="with a few blocks passes are postponed"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    llm = LLM(demo_model(), num_blocks=arguments.blocks, max_num_seqs=64)
    alone = LLM(demo_model(), num_blocks=4096, max_num_seqs=64)
    cases = make_cases(arguments.seed, arguments.requests, KEYS, compress=not arguments.no_compression)
    report = asyncio.run(soak(llm, alone, cases, arguments.clients))
    print(json.dumps({"outcomes": report.outcomes, **report.facts}, indent=2))
    for violation in report.violations:
        print(f"VIOLATION: {violation}", file=sys.stderr)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
