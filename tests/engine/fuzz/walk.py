"""Random walks over the engine, each from one seed, every third one in a crowd, every third one of
conversations, two of five with dropped spans, every fourth one over recurrent layers; a failing one is made
short.

python scripts/fuzz.py --steps 100000        # many walks, seeds from 0 on
python scripts/fuzz.py --seed 17             # one of them again, with the shortest operations that fail
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from alone import Oracle
from machine import Machine, running_machine
from operations import (
    Operation,
    Setup,
    Step,
    crowded,
    dropping,
    random_operations,
    random_setup,
    recurrent,
    talking,
)
from world import World

from kvreclaim.errors import InvalidArgumentError

STEPS_PER_WALK = 100


@dataclass(frozen=True)
class Walk:
    """An engine and what is done to it."""

    setup: Setup
    operations: tuple[Operation, ...]

    @classmethod
    def of_seed(
        cls,
        seed: int,
        num_steps: int = STEPS_PER_WALK,
        *,
        crowd: bool = False,
        talk: bool = False,
        drop: bool = False,
        hybrid: bool = False,
    ) -> Walk:
        """crowd: many compressed requests about one text in few blocks; talk: turns of conversations; drop:
        most drop spans of their prompts; hybrid: over a model with recurrent layers."""
        random = Random(seed)
        setup, operations = random_setup(random), random_operations(random, num_steps)
        if crowd:
            setup, operations = crowded(random, setup, operations)
        if talk:
            setup, operations = talking(random, setup, operations)
        if drop:
            setup, operations = dropping(random, setup, operations)
        if hybrid:
            setup, operations = recurrent(random, setup, operations)
        return cls(setup, tuple(operations))

    def run(self, machine: Machine, oracle: Oracle) -> Counter[str]:
        """Raises: AssertionError for whatever is not as it should be, or what the engine raised."""
        if family := self.setup.windows or self.setup.hybrid:
            machine, oracle = machine.of(family), oracle.of(family)
        try:
            world = World(machine, self.setup)
        except InvalidArgumentError as refused:
            if refused.field != "max_model_len":
                raise
            return Counter(["pools that hold not a single token"])
        try:
            for operation in self.operations:
                world.do(operation)
            world.finish(oracle)
        finally:
            world.close()
        return world.counts

    def shortened(self, machine: Machine, oracle: Oracle, limit_s: float = 120.0) -> Walk:
        """A walk that fails at the same place, from which no single operation can be taken (as far as time
        allows)."""
        place = self.failure(machine, oracle)
        ops, size, until = list(self.operations), len(self.operations) // 2, time.monotonic() + limit_s
        while size and time.monotonic() < until:
            first = 0
            while first < len(ops) and time.monotonic() < until:
                fewer = ops[:first] + ops[first + size :]
                if Walk(self.setup, tuple(fewer)).failure(machine, oracle) == place:
                    ops = fewer
                else:
                    first += size
            size //= 2
        return Walk(self.setup, tuple(ops))

    def failure(self, machine: Machine, oracle: Oracle) -> str | None:
        """The line that raises; None: all is well."""
        try:
            self.run(machine, oracle)
        except Exception as error:
            return last_lines(error, 1)
        return None

    def __str__(self) -> str:
        """Python that builds the walk; neighbouring steps as one."""
        lines: list[Operation] = []
        for operation in self.operations:
            if isinstance(operation, Step) and lines and isinstance(lines[-1], Step):
                operation = Step(lines.pop().times + operation.times)
            lines.append(operation)
        return (
            f"Walk(\n    {self.setup!r},\n    (\n"
            + "".join(f"        {op!r},\n" for op in lines)
            + "    ),\n)"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Random walks over the engine.")
    parser.add_argument("--steps", type=int, default=100_000, help="engine steps of all walks together")
    parser.add_argument("--first", type=int, default=0, help="seed of the first walk")
    parser.add_argument("--seed", type=int, help="run this walk alone")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, running_machine(Path(directory)) as machine:
        return walk_on(
            machine,
            given.first if given.seed is None else given.seed,
            1 if given.seed is not None else given.steps,
        )


def walk_on(machine: Machine, seed: int, num_steps: int) -> int:
    """Walks from this seed on until there were so many steps. Returns: the exit status."""
    oracle, total, started = Oracle(machine), Counter[str](), time.monotonic()
    while total["steps"] < num_steps:
        walk = Walk.of_seed(
            seed, crowd=seed % 3 == 2, talk=seed % 3 == 1, drop=seed % 5 > 2, hybrid=seed % 4 == 3
        )
        try:
            total += walk.run(machine, oracle)
        except Exception as error:
            print(
                f"seed {seed} fails: {type(error).__name__}: {error}\n{last_lines(error)}\nshortening",
                flush=True,
            )
            print(walk.shortened(machine, oracle))
            print(f"again: python scripts/fuzz.py --seed {seed}")
            return 1
        seed += 1
        if seed % 10 == 0:
            print(f"{time.monotonic() - started:.0f} s, seeds below {seed}: {dict(total)}", flush=True)
    print(f"{time.monotonic() - started:.0f} s, {oracle.ties} ties: {dict(total)}")
    return 0


def last_lines(error: Exception, count: int = 4) -> str:
    """The innermost calls of the traceback."""
    return "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-count:]))


if __name__ == "__main__":
    sys.exit(main())
