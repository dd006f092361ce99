"""The tiers below the pool under everything at once: a tiny pool, a small host, a file smaller than the load,
shared prefixes, salts, compression, compressed prefixes, forks, aborts, preemption, a disk that fails,
processes that are killed and bytes that flip in between. Every greedy answer must be the one of an engine
without tiers.

    python scripts/soak_tiers.py --requests 10000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from soak_tiers_cases import LIMITS, Oracle, make_cases

from kvreclaim import LLM, demo_model

HERE = Path(__file__).parent
PER_PHASE = 300
"""Most requests of a phase."""
FAULT_RATES = (0.0, 0.0, 0.002, 0.002, 0.01, 0.1)
"""Of calls to the disk, one for each phase; with the last one the disk is soon left alone for a minute."""


class WrongError(Exception):
    """What should never happen."""


@dataclass
class Report:
    """outcomes: of requests and phases; tiers: sums of what the phases counted."""

    outcomes: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)


class Soak:
    """Phases over one directory until every request has ended. Raises: WrongError."""

    def __init__(self, seed: int, num_requests: int, directory: Path) -> None:
        self.seed, self.num_requests, self.directory = seed, num_requests, directory
        self.rng, self.report = random.Random(seed), Report()
        self.cases = make_cases(seed, num_requests)
        alone = LLM(demo_model(), **LIMITS, num_blocks=512, prefix_snapshot_fraction=0.0)
        self.oracle = Oracle(alone, self.cases)
        numbers = [self.rng.randrange(len(self.cases)) for _ in range(num_requests)]
        self.left = deque(enumerate(numbers))

    def run(self) -> Report:
        number = 0
        while self.left:
            self._phase(number)
            self._flip()
            number += 1
        return self.report

    def _phase(self, number: int) -> None:
        size = min(len(self.left), PER_PHASE, max(20, self.num_requests // 6))
        requests = dict(self.left.popleft() for _ in range(size))
        kill_after = self.rng.randrange(size) if self.rng.random() < 0.5 else None
        told = {
            "seed": self.seed * 10_000 + number,
            "cases_seed": self.seed,
            "num_requests": self.num_requests,
            "directory": str(self.directory),
            "requests": list(requests.items()),
            "fault_rate": self.rng.choice(FAULT_RATES),
        }
        with tempfile.TemporaryFile("w+") as errors:
            killed = self._run(told, requests, kill_after, errors.fileno())
            if not killed:
                errors.seek(0)
                self._require_clean(number, requests, errors.read())
        self.report.outcomes["phases killed" if killed else "phases closed"] += 1
        self.left.extendleft(reversed(requests.items()))
        print(f"phase {number}: {len(self.left)} requests left", file=sys.stderr)

    def _run(
        self, told: dict[str, object], requests: dict[int, int], kill_after: int | None, errors: int
    ) -> bool:
        """Take answers out of the requests as they come. Returns: whether the process was killed."""
        counted: dict[str, int] = {}
        self._code, self._closed, num_answers = 0, False, 0
        with subprocess.Popen(
            [sys.executable, HERE / "soak_tiers_phase.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process:
            assert process.stdin is not None, "it is a pipe"
            assert process.stdout is not None, "it is a pipe"
            process.stdin.write(json.dumps(told))
            process.stdin.close()
            killed = False
            for line in process.stdout:
                said = json.loads(line) if line.endswith("\n") else {}
                counted = said.get("stats", counted)
                self._closed = self._closed or "closed" in said
                if "place" in said:
                    self._take(said, requests)
                    num_answers += 1
                if kill_after is not None and num_answers >= kill_after and not killed:
                    time.sleep(self.rng.random() * 0.05)
                    process.kill()
                    killed = True
            self._code = process.wait()
        self.report.tiers.update(counted)
        return killed

    def _take(self, said: dict[str, object], requests: dict[int, int]) -> None:
        number = requests.pop(int(str(said["place"])))
        outcomes, case = self.report.outcomes, self.cases[number]
        if said.get("aborted"):
            outcomes["aborted"] += 1
            return
        tokens = said["tokens"]
        assert isinstance(tokens, list), tokens
        if said["error"] is not None or len(tokens) != case.n:
            raise WrongError(f"{case}: {len(tokens)} outputs, error {said['error']}")
        if not case.greedy:
            outcomes["drawn"] += 1
        else:
            verdict = self.oracle.judge(number, tokens)
            if verdict not in (None, "tie"):
                raise WrongError(f"{case}: {verdict}; {said['preemptions']} preemptions")
            kind = "compressed" if case.policy else "full"
            kind = kind if case.compress_prompt_at is None else "compressed at a place"
            outcomes["a tie" if verdict else f"as alone, {kind}"] += 1

    def _require_clean(self, number: int, requests: dict[int, int], errors: str) -> None:
        if self._code or not self._closed or requests:
            left = f"{len(requests)} requests without an answer"
            raise WrongError(f"phase {number} ended with exit code {self._code}, {left}\n{errors[-6000:]}")

    def _flip(self) -> None:
        """Change some bytes of the files, every other time."""
        if self.rng.random() < 0.5:
            return
        for path in sorted([*self.directory.rglob("slots*"), *self.directory.rglob("*.prefix")]):
            if path.suffix == ".prefix" and self.rng.random() < 0.5:
                continue
            with path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                for _ in range(self.rng.randrange(1, 64) if size else 0):
                    at = self.rng.randrange(size)
                    file.seek(at)
                    old = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([old ^ (1 << self.rng.randrange(8))]))
                    self.report.outcomes["bytes flipped"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvreclaim-soak-") as directory:
        soak, wrong = Soak(arguments.seed, arguments.requests, Path(directory)), None
        try:
            soak.run()
        except WrongError as error:
            wrong = error
        finally:  # stopped by hand, too
            facts = {"requests left": len(soak.left), "elapsed_s": round(time.monotonic() - started, 1)}
            print(json.dumps({**soak.report.outcomes, **soak.report.tiers, **facts}, indent=1))
    if wrong is not None:
        print(f"VIOLATION: {wrong}", file=sys.stderr)
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main())
