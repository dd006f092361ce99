"""The tiers below the pool under everything at once: a tiny pool, a small host, a file smaller than the load,
shared prefixes, salts, compression, compressed prefixes, forks, aborts, preemption, a disk that fails,
processes that are killed and bytes that flip in between. Every greedy answer must be the one of an engine
without tiers.

    python tests/soak/tiers.py --requests 10000
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
from pathlib import Path
from typing import Any

from tiers_phase import LIMITS, Case, make_cases

from kvreclaim import LLM, demo_model

PER_PHASE = 300
"""Most requests of a phase."""
FAULT_RATES = (0.0, 0.0, 0.002, 0.002, 0.01, 0.1)
"""Shares of disk calls that fail, one for each phase; at the last one the disk is soon left alone."""
TIE = 1e-4
"""Log-probabilities of two tokens that differ by less may change places with the order of sums, in fp32."""


class WrongError(Exception):
    """What should never happen."""


class Oracle:
    """What an engine without tiers answers to each request alone; each is computed once."""

    def __init__(self, cases: list[Case]) -> None:
        self.llm = LLM(demo_model(), **LIMITS, num_blocks=512, prefix_snapshot_fraction=0.0)
        self.cases = cases
        self._known: dict[int, tuple[list[int], list[float]]] = {}

    def is_tie(self, number: int, found: list[list[int]]) -> bool:
        """Whether another token came first where two are equally likely; False: equal. Raises: WrongError."""
        tokens, gaps = self._answer(number)
        for output in found:
            if len(output) != len(tokens):
                raise WrongError(f"{self.cases[number]}: {len(output)} tokens, alone {len(tokens)}")
            first = next((i for i, token in enumerate(output) if token != tokens[i]), None)
            if first is not None and gaps[first] > TIE:
                pair = f"{output[first]}, alone {tokens[first]}, {gaps[first]:.4f} likelier"
                raise WrongError(f"{self.cases[number]}: token {first} is {pair}")
        return any(output != tokens for output in found)

    def _answer(self, number: int) -> tuple[list[int], list[float]]:
        """Tokens, and for each by how much it was likelier than the next one."""
        if number not in self._known:
            case = self.cases[number]
            prompt = {
                "prompt_token_ids": list(case.prompt),
                "cache_salt": case.salt,
                "compress_prompt_at": case.compress_prompt_at,
            }
            (output,) = self.llm.generate(prompt, case.params(2), case.compression())
            assert output.error is None, output.error
            first = output.outputs[0]
            each = [sorted(entry.logprob for entry in drawn.values()) for drawn in first.logprobs or ()]
            self._known[number] = list(first.token_ids), [one[-1] - one[-2] for one in each]
        return self._known[number]


class Soak:
    """Phases over one directory until every request has ended. Raises: WrongError."""

    def __init__(self, seed: int, num_requests: int, directory: Path) -> None:
        self.seed, self.num_requests, self.directory = seed, num_requests, directory
        self.rng, self.outcomes, self.counts = random.Random(seed), Counter[str](), Counter[str]()
        self.cases = make_cases(seed, num_requests)
        self.oracle = Oracle(self.cases)
        self.left = deque(enumerate(self.rng.randrange(len(self.cases)) for _ in range(num_requests)))

    def run(self) -> None:
        number = 0
        while self.left:
            self._phase(number)
            self._flip()
            number += 1

    def _phase(self, number: int) -> None:
        size = min(len(self.left), PER_PHASE, max(20, self.num_requests // 6))
        requests = dict(self.left.popleft() for _ in range(size))
        kill_after = self.rng.randrange(size) if self.rng.random() < 0.5 else None
        settings = {
            "seed": self.seed * 10_000 + number,
            "cases_seed": self.seed,
            "num_requests": self.num_requests,
            "directory": str(self.directory),
            "requests": list(requests.items()),
            "fault_rate": self.rng.choice(FAULT_RATES),
        }
        with tempfile.TemporaryFile("w+") as errors:
            killed, code, closed = self._run(settings, requests, kill_after, errors.fileno())
            if not killed and (code or not closed or requests):
                errors.seek(0)
                left = f"{len(requests)} requests without an answer"
                raise WrongError(f"phase {number} ended with {code}, {left}\n{errors.read()[-6000:]}")
        self.outcomes["phases killed" if killed else "phases closed"] += 1
        self.left.extendleft(reversed(requests.items()))
        print(f"phase {number}: {len(self.left)} requests left", file=sys.stderr)

    def _run(
        self, settings: dict[str, object], requests: dict[int, int], kill_after: int | None, errors: int
    ) -> tuple[bool, int, bool]:
        """Take answers out of the requests as they come. Returns: whether the process was killed, its code,
        whether it closed its engine."""
        counted: dict[str, int] = {}
        killed, closed, num_answers = False, False, 0
        command = [sys.executable, Path(__file__).with_name("tiers_phase.py")]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        with subprocess.Popen(command, text=True, **pipes) as process:
            process.stdin.write(json.dumps(settings))
            process.stdin.close()
            for line in process.stdout:
                report = json.loads(line) if line.endswith("\n") else {}
                counted = report.get("stats", counted)
                closed = closed or "closed" in report
                if "place" in report:
                    self._take(report, requests.pop(report["place"]))
                    num_answers += 1
                if kill_after is not None and num_answers >= kill_after and not killed:
                    time.sleep(self.rng.random() * 0.05)
                    process.kill()
                    killed = True
            code = process.wait()
        self.counts.update(counted)
        return killed, code, closed

    def _take(self, report: dict[str, Any], number: int) -> None:
        case = self.cases[number]
        if report.get("aborted"):
            self.outcomes["aborted"] += 1
        elif report["error"] is not None or len(report["tokens"]) != case.n:
            raise WrongError(f"{case}: {report}")
        elif not case.greedy:
            self.outcomes["drawn"] += 1
        elif self.oracle.is_tie(number, report["tokens"]):
            self.outcomes["a tie"] += 1
        else:
            kind = (
                "compressed at a place"
                if case.compress_prompt_at
                else "compressed"
                if case.policy
                else "full"
            )
            self.outcomes[f"as alone, {kind}"] += 1

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
                    self.outcomes["bytes flipped"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    started, wrong = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="kvreclaim-soak-") as directory:
        soak = Soak(given.seed, given.requests, Path(directory))
        try:
            soak.run()
        except WrongError as error:
            wrong = error
        finally:  # stopped by hand, too
            facts = {"requests left": len(soak.left), "elapsed_s": round(time.monotonic() - started, 1)}
            print(json.dumps({**soak.outcomes, **soak.counts, **facts}, indent=1))
    if wrong is not None:
        print(f"VIOLATION: {wrong}", file=sys.stderr)
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main())
