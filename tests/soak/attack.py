"""Attacks a server in full size, as strangers and tenants could, and reports what others noticed of it.

    python tests/soak/attack.py                 # everything: some minutes
    python tests/soak/attack.py --only slow     # the attacks whose names contain it

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
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread

import psutil
from attacks import SERVERS, Attack, Outcome, Server
from client import first_token, health
from grammar_attacks import MOST_STORED, STORED, STRUCTURED
from server import KEYED, MODEL, Target, serving
from writer import save_writer

OTHERS = {
    "structured": Server(KEYED, STRUCTURED),
    "storing": Server([*KEYED, "--max-stored-responses", str(MOST_STORED)], [STORED]),
}
WRITES = ("structured",)
"""Their model can write any text; the demo model has only words."""
WORDS = ("lark", "shell", "dew", "mole", "nest", "wind", "wave", "sky", "sun", "sand")
PER_MB_S, LEAST_S = 1.0, 1.0
GROWTH, LEAST_GROWTH = 4, 32 << 20
HEALTH_S = 0.25
FIRST_TOKEN = 3.0
WATCH_S = 4.0
PAUSE_S = 0.2
"""Between two strikes: how many requests a client may send is for a reverse proxy to limit."""


@dataclass(slots=True)
class Seen:
    """What others noticed: waits for /health and for first tokens, the most memory."""

    healths_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    memory: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def health_s(self) -> float:
        return max(self.healths_s, default=0.0)

    @property
    def first_token_s(self) -> float:
        """Longer than nine of ten, for one alone may be the machine's."""
        return sorted(self.first_tokens_s)[int(0.9 * (len(self.first_tokens_s) - 1))]

    def time(self, waits_s: list[float], work: Callable[[], None]) -> None:
        begun = time.perf_counter()
        try:
            work()
        except (OSError, ValueError) as error:
            self.problems.append(f"another client: {type(error).__name__}: {error}")
        waits_s.append(time.perf_counter() - begun)


@contextmanager
def watching(target: Target) -> Iterator[Seen]:
    """Poll /health, first tokens and memory until the block ends."""
    seen, stop = Seen(memory=resident(target.pid)), Event()

    def ask_health() -> None:
        seen.time(seen.healths_s, lambda: health(target))

    def ask_token() -> None:
        prompt = " ".join(random.choices(WORDS, k=900))
        seen.time(seen.first_tokens_s, lambda: first_token(target, prompt))

    def look_at_memory() -> None:
        seen.memory = max(seen.memory, resident(target.pid))

    def again(work: Callable[[], None], pause_s: float) -> None:
        work()
        while not stop.wait(pause_s):
            work()

    watches = ((ask_health, 0.02), (ask_token, 0.1), (look_at_memory, 0.05))
    threads = [Thread(target=again, args=watch) for watch in watches]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def resident(pid: int) -> int:
    """Bytes of a process and all that it started."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            total += process.memory_info().rss
    return total


def run(attack: Attack, target: Target, alone: Seen) -> bool:
    """Attack for a while and print what came of it. Returns: whether something was missed."""
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
    growth = seen.memory - before
    missed = judge(attack, outcomes, seen, alone, growth)
    missed += attack.check(target) if attack.check is not None else []
    counts = Counter(outcome.status or "closed" for outcome in outcomes)
    answers = ", ".join(f"{count} × {status}" for status, count in counts.items())
    verdict = "ok" if not missed else "MISS" if attack.judged else "note"
    print(
        f"{verdict:4} {attack.name:44} {answers:18} "
        f"{max((outcome.sent for outcome in outcomes), default=0) / 1e6:7.1f} MB "
        f"{max((outcome.elapsed_s for outcome in outcomes), default=0.0):6.2f} s  "
        f"memory {growth / 1e6:+7.0f} MB  health {1e3 * seen.health_s:5.0f} ms  "
        f"first token {1e3 * seen.first_token_s:5.0f} ms ({1e3 * alone.first_token_s:.0f} alone)",
        *missed,
        sep="\n     ",
        flush=True,
    )
    return bool(missed) and attack.judged


def repeat(attack: Attack, target: Target, sender: Connection) -> None:
    """Repeat the attack, in a process of its own."""
    outcomes: list[Outcome] = []
    until = time.monotonic() + WATCH_S
    while not outcomes or time.monotonic() < until:
        outcomes += attack.strike(target)
        time.sleep(PAUSE_S)
    sender.send(outcomes)


def judge(attack: Attack, outcomes: list[Outcome], seen: Seen, alone: Seen, growth: int) -> list[str]:
    missed = [*seen.problems, *(() if outcomes else ("the attack itself failed",))]
    for outcome in outcomes:
        if outcome.status not in attack.expected:
            missed.append(f"status {outcome.status}, expected {attack.expected}")
        limit_s = max(LEAST_S, PER_MB_S * outcome.sent / 1e6)
        if attack.refused and outcome.elapsed_s > limit_s:
            missed.append(f"refused after {outcome.elapsed_s:.2f} s, the limit is {limit_s:.2f} s")
    most = attack.growth
    if attack.refused:
        most = max(LEAST_GROWTH, GROWTH * max((outcome.together for outcome in outcomes), default=0))
    if most is not None and growth > most:
        missed.append(f"memory grew by {growth / 1e6:.0f} MB, the limit is {most / 1e6:.0f} MB")
    if seen.health_s > HEALTH_S:
        missed.append(f"/health took {1e3 * seen.health_s:.0f} ms")
    if seen.first_token_s > FIRST_TOKEN * alone.first_token_s:
        ratio = seen.first_token_s / alone.first_token_s
        missed.append(f"another tenant's first token took {ratio:.1f} times as long as alone")
    return list(dict.fromkeys(missed))[:8]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="part of the attacks' names")
    only = parser.parse_args().only
    multiprocessing.set_start_method("fork")
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        for name, server in {**SERVERS, **OTHERS}.items():
            attacks = [attack for attack in server.attacks if only in f"{name} {attack.name}"]
            if not attacks:
                continue
            options = server.options
            if name in WRITES:
                model = save_writer(Path(directory) / "writer")
                options = [*options, "--model", str(model), "--served-model-name", MODEL]
            with serving(options, Path(directory) / f"{name}.log") as target:
                print(f"{name}: kvreclaim serve {' '.join(options)}", flush=True)
                first_token(target, "lark dew")  # what is made at the first request
                with watching(target) as alone:
                    time.sleep(2 * WATCH_S)
                missed += sum([run(attack, target, alone) for attack in attacks])
    print("nothing was missed" if not missed else f"{missed} attacks did what they must not")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
