"""Many clients at once, with everything that a client may do: every finished answer must be the one that the
same request gets alone, and in the end every block must be back. Over the second half of the requests another
tenant attacks, and others send what the server's own description allows: nothing may be answered with a 5xx,
and the report has the effect of the attack on first tokens.

    python tests/soak/serve.py --requests 1000 --clients 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from cases import MESSAGES, Case, Seen, expected, make_cases
from server import KEYED, OPERATOR, Target, serving

from kvreclaim import LLM, demo_model

TIMEOUT_S = 300.0
LAST_ANSWER_S = 90.0
KEYS = ("key-a", "key-b", "key-c")
COUNTED = ("generation_tokens", "num_preemptions", "compactions")


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
    headers = {"authorization": f"Bearer {case.key}"}
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
    seen.num_generated = usage["completion_tokens" if "completion_tokens" in usage else "output_tokens"]


@asynccontextmanager
async def beside(report: Report, target: Target, *programs: str) -> AsyncIterator[None]:
    """Programs of beside.py until the block ends; what they print are violations."""
    command = (sys.executable, str(Path(__file__).with_name("beside.py")))
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    running = [
        await asyncio.create_subprocess_exec(*command, program, str(target.port), str(target.pid), **pipes)
        for program in programs
    ]
    try:
        yield
    finally:
        for program, process in zip(programs, running, strict=True):
            try:  # its input ends, and so does it
                output, _ = await asyncio.wait_for(process.communicate(b""), LAST_ANSWER_S)
            except TimeoutError:
                process.kill()
                report.violations.append(f"{program} waited {LAST_ANSWER_S:g} s for its last answer")
                continue
            *problems, report.facts[program] = output.decode().splitlines() or ["it printed nothing"]
            report.violations += [f"{program}: {problem}" for problem in problems]
            if process.returncode:
                report.violations.append(f"{program} ended with exit code {process.returncode}")


async def soak(target: Target, cases: list[Case], num_clients: int, programs: tuple[str, ...]) -> Report:
    """Run the cases, so many clients at once, each of which takes the next case. programs: what goes on
    beside the second half of them."""
    report, begun = Report(), time.perf_counter()
    limits, url = httpx2.Limits(max_connections=None), f"http://127.0.0.1:{target.port}"
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:

        async def answers_to(some: list[Case]) -> list[tuple[Case, Seen]]:
            waiting = iter(some)

            async def one_client() -> list[tuple[Case, Seen]]:
                return [(case, await ask(client, case)) for case in waiting]

            found = await asyncio.gather(*(one_client() for _ in range(num_clients)))
            return [pair for pairs in found for pair in pairs]

        before = await answers_to(cases[: len(cases) // 2])
        async with beside(report, target, *programs):
            during = await answers_to(cases[len(cases) // 2 :])
        report.facts["elapsed_s"] = round(time.perf_counter() - begun, 2)
        await _settle(client, report)
    report.facts |= {"first_token_ms": _first_tokens(before), "first_token_ms_beside": _first_tokens(during)}
    alone = LLM(demo_model(), num_blocks=4096, max_num_seqs=64)
    for case, seen in before + during:
        report.check(case, seen, alone)
    return report


async def _settle(client: httpx2.AsyncClient, report: Report) -> None:
    """All that was left is aborted soon; then nothing runs and no block is in use."""
    headers, deadline = {"authorization": f"Bearer {OPERATOR}"}, time.monotonic() + TIMEOUT_S
    while True:
        load = (await client.get("/load", headers=headers)).json()
        held = {name: load[name] for name in ("server_load", "blocks_in_use") if load[name]}
        if not held or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    report.violations += [f"in the end /load says {name} {value}" for name, value in held.items()]
    metrics = (await client.get("/metrics", headers=headers)).text
    for name in COUNTED:
        found = re.findall(rf"^\w+:{name}_total(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
        report.facts[name] = sum(map(float, found))


def _first_tokens(answers: list[tuple[Case, Seen]]) -> dict[str, float]:
    """Return percentiles of times to first tokens, in ms, of the streams that had one."""
    waits_s = [seen.first_s for _, seen in answers if seen.first_s is not None]
    return {f"p{q}": round(1e3 * float(np.percentile(waits_s, q)), 1) for q in (50, 99)} if waits_s else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=4096, help="a few: requests preempt each other")
    parser.add_argument("--no-compression", action="store_true", help="every request keeps its full cache")
    parser.add_argument("--thread", action="store_true", help="the engine in a thread of the server")
    parser.add_argument("--alone", action="store_true", help="no attack, nothing else beside")
    given = parser.parse_args()
    options = [*KEYED, *(part for key in KEYS for part in ("--api-key", key))]
    options += ["--num-gpu-blocks-override", str(given.blocks), "--max-num-seqs", "64"]
    options += ["--no-conversation-snapshots"]  # every answer as alone, and in the end no block held
    options += ["--no-engine-process"] if given.thread else []
    cases = make_cases(given.seed, given.requests, KEYS, compress=not given.no_compression)
    programs = () if given.alone else ("attack", "schema")
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(options, Path(directory) / "server.log") as target,
    ):
        report = asyncio.run(soak(target, cases, given.clients, programs))
    print(json.dumps({"outcomes": report.outcomes, **report.facts}, indent=2))
    for violation in report.violations:
        print(f"VIOLATION: {violation}", file=sys.stderr)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
