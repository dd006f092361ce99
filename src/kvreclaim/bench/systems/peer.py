"""Another engine in its own process and environment, stepped from here."""

from __future__ import annotations

from kvreclaim.bench.systems.base import Point, Session, Slice, System
from kvreclaim.bench.systems.worker_process import WorkerProcess


class Peer(System):
    """Answers from a process with known facts."""

    process: WorkerProcess

    def open(self, point: Point) -> PeerSession:
        return PeerSession(self.process, point)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return list(self.process.ask("generate", prompts=prompts, max_tokens=max_tokens)["tokens"])

    def close(self) -> None:
        self.process.close()


class PeerSession(Session):
    """Sequences that stay in the other system's cache."""

    def __init__(self, process: WorkerProcess, point: Point) -> None:
        self.process = process
        answer = process.ask(
            "open",
            prompts=point.prompts(process.facts["vocab_size"]),
            max_tokens=point.max_len - point.context,
            synthetic=point.fill == "synthetic",
        )
        self.fill_s = float(answer["fill_s"])

    def run(self, steps: int) -> Slice:
        answer = self.process.ask("run", steps=steps)
        return Slice(steps, answer["tokens"], answer["elapsed_s"])

    def close(self) -> None:
        self.process.ask("close")
