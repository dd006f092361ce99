"""Attacks a server in full size, as strangers and tenants could, and says what others noticed of it.

    python scripts/attack.py                 # everything: some minutes
    python scripts/attack.py --only slow     # the attacks whose names contain it

For each attack, while it runs in a process of its own: its requests end in a 4xx, within 1 s per MB of body
(1 s at least); the memory of the server and its children grows by less than four times what was sent at once
(32 MB at least, which allocators take); another client's longest wait for /health is 250 ms; nine of ten
first tokens of another tenant come within three times the time within which they come without the attack.
Exit status 1 on a miss.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread

from attack_cases import SERVERS
from attack_client import first_token, health
from attack_kit import WORDS, Attack, Outcome, Target

PER_MB_S, LEAST_S = 1.0, 1.0
GROWTH, LEAST_GROWTH = 4, 32 << 20
HEALTH_S = 0.25
FIRST_TOKEN = 3.0
WATCH_S = 4.0
PAUSE_S = 0.2
"""Between two strikes: how often a client may ask at all is for a reverse proxy to say."""
START_S = 120.0


@dataclass(slots=True)
class Seen:
    """What others noticed: the longest wait for /health, all waits for first tokens, the most memory."""

    health_s: float = 0.0
    first_tokens_s: list[float] = field(default_factory=list)
    memory: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """Longer than nine of ten, for one alone may be the machine's."""
        return sorted(self.first_tokens_s)[int(0.9 * (len(self.first_tokens_s) - 1))]


@contextmanager
def watching(target: Target) -> Iterator[Seen]:
    """Poll /health, first tokens and memory until the block ends."""
    seen, stop = Seen(memory=resident(target.pid)), Event()

    def healths() -> None:
        while not stop.is_set():
            seen.health_s = max(seen.health_s, timed(partial(health, target.port), seen))
            stop.wait(0.02)

    def tokens() -> None:
        while not stop.is_set():
            prompt = " ".join(random.choices(WORDS, k=900))
            wait = timed(partial(first_token, target.port, target.other_key, prompt), seen)
            seen.first_tokens_s.append(wait)
            stop.wait(0.1)

    def memory() -> None:
        while not stop.wait(0.05):
            seen.memory = max(seen.memory, resident(target.pid))

    threads = [Thread(target=watch) for watch in (healths, tokens, memory)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def timed(work: Callable[[], None], seen: Seen) -> float:
    begun = time.perf_counter()
    try:
        work()
    except (OSError, ValueError) as error:
        seen.problems.append(f"another client: {type(error).__name__}: {error}")
    return time.perf_counter() - begun


def resident(pid: int) -> int:
    """Bytes of a process and all that it started."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total = int(line.split()[1]) << 10
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(child)) for child in (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended meanwhile
    return total


def run(attack: Attack, target: Target, alone: Seen) -> list[str]:
    """Attack for a while and print what came of it. Returns what was missed."""
    before = resident(target.pid)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with watching(target) as seen:
        child = multiprocessing.Process(target=repeat, args=(attack, target, sender))
        child.start()
        sender.close()
        try:
            outcomes: list[Outcome] = receiver.recv()
        except EOFError:
            outcomes = []
        child.join()
    missed = judge(attack, outcomes, seen, alone, seen.memory - before)
    missed += attack.check(target) if attack.check is not None else []
    verdict = "ok" if not missed else "MISS" if attack.judged else "note"
    sent = max((outcome.sent for outcome in outcomes), default=0)
    slowest = max((outcome.elapsed_s for outcome in outcomes), default=0.0)
    print(
        f"{verdict:4} {attack.name:44} {statuses(outcomes):18} {sent / 1e6:7.1f} MB "
        f"{slowest:6.2f} s  memory {(seen.memory - before) / 1e6:+7.0f} MB  "
        f"health {1e3 * seen.health_s:5.0f} ms  "
        f"first token {1e3 * seen.first_token_s:5.0f} ms ({1e3 * alone.first_token_s:.0f} alone)",
        flush=True,
    )
    for sentence in missed:
        print(f"     {sentence}", flush=True)
    return missed if attack.judged else []


def repeat(attack: Attack, target: Target, sender: Connection) -> None:
    """In the attacker's process."""
    outcomes: list[Outcome] = []
    until = time.monotonic() + WATCH_S
    while not outcomes or time.monotonic() < until:
        outcomes += attack.strike(target)
        time.sleep(PAUSE_S)
    sender.send(outcomes)


def judge(attack: Attack, outcomes: list[Outcome], seen: Seen, alone: Seen, growth: int) -> list[str]:
    missed = list(dict.fromkeys(seen.problems))
    if not outcomes:
        missed.append("the attack itself failed")
    for outcome in outcomes:
        if outcome.status not in attack.expected:
            missed.append(f"status {outcome.status}, expected {attack.expected}")
        limit_s = max(LEAST_S, PER_MB_S * outcome.sent / 1e6)
        if attack.refused and outcome.elapsed_s > limit_s:
            missed.append(f"refused after {outcome.elapsed_s:.2f} s, the limit is {limit_s:.2f} s")
    most = max(LEAST_GROWTH, GROWTH * max((outcome.together for outcome in outcomes), default=0))
    if attack.refused and growth > most:
        missed.append(f"memory grew by {growth / 1e6:.0f} MB, the limit is {most / 1e6:.0f} MB")
    if seen.health_s > HEALTH_S:
        missed.append(f"/health took {1e3 * seen.health_s:.0f} ms")
    if seen.first_token_s > FIRST_TOKEN * alone.first_token_s:
        ratio = seen.first_token_s / alone.first_token_s
        missed.append(f"another tenant's first token took {ratio:.1f} times as long as alone")
    return list(dict.fromkeys(missed))[:8]


def statuses(outcomes: list[Outcome]) -> str:
    counts: dict[int | None, int] = {}
    for outcome in outcomes:
        counts[outcome.status] = counts.get(outcome.status, 0) + 1
    return ", ".join(f"{count} × {status or 'closed'}" for status, count in counts.items())


@contextmanager
def serving(name: str, options: list[str], directory: Path) -> Iterator[Target]:
    """`kvreclaim serve` with the demo model, in a process of its own."""
    log = directory / f"{name}.log"
    command = [sys.executable, "-c", "from kvreclaim.cli.main import app; app()", "serve", "--model", "demo"]
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, "--port", "0", *options], stderr=stream, stdout=stream)
    try:
        yield Target(wait_for_port(process, log), process.pid, log, *SERVERS[name].keys)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"serving .* at http://[^ ]*:(\d+)", log.read_text(errors="replace")):
            return int(found[1])
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of the attacks' names")
    arguments = parser.parse_args()
    multiprocessing.set_start_method("fork")
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        for name, server in SERVERS.items():
            attacks = [attack for attack in server.attacks if arguments.only in f"{name} {attack.name}"]
            if not attacks:
                continue
            with serving(name, server.options, Path(directory)) as target:
                print(f"{name}: kvreclaim serve {' '.join(server.options)}", flush=True)
                first_token(target.port, target.other_key, "lark dew")  # what is made at the first request
                with watching(target) as alone:
                    time.sleep(2 * WATCH_S)
                for attack in attacks:
                    missed += bool(run(attack, target, alone))
    print("nothing was missed" if not missed else f"{missed} attacks did what they must not")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
