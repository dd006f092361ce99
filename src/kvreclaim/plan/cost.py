"""The time of a step, by its work."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from kvreclaim.checks import parse_json, require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.outputs import write_json
from kvreclaim.schedule import Row, ScheduledSequence

VERSION = 1


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work of a step.

    num_tokens:    computed tokens
    num_seqs:      sequences with computed tokens
    kv_tokens:     keys that decoding sequences read, summed up
    prefill_pairs: (query, key) pairs of prompts, summed up
    decodes:       sequences that compute only their newest token
    """

    num_tokens: int = 0
    num_seqs: int = 0
    kv_tokens: int = 0
    prefill_pairs: float = 0.0
    decodes: int = 0


class StepTime(Protocol):
    """Seconds. With only the keys that are read differing, a step's time is affine in them."""

    def step_s(self, load: StepLoad) -> float:
        """Seconds of a step."""

    def pass_s(self, num_tokens: int, kept: int) -> float:
        """Seconds to compress a sequence of num_tokens live tokens to `kept`."""

    def move_s(self, num_blocks: int) -> float:
        """Seconds to move blocks between device and host."""


@dataclass(frozen=True, slots=True)
class Linear:
    """base + token·T + beyond·max(0, T - knee) + kv·keys + pair·pairs + seq·sequences; the rest is per pass,
    per block. All in seconds.

    A roofline is one, too: reading the weights takes `base`, computing T tokens beyond·T, and where the two
    meet is the knee.

    facts: origin: device, model, versions, error
    """

    base: float
    token: float = 0.0
    kv: float = 0.0
    pair: float = 0.0
    seq: float = 0.0
    beyond: float = 0.0
    knee: float = 128
    compaction: float = 0.0
    move: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def step_s(self, load: StepLoad) -> float:
        more = load.num_tokens - self.knee
        return (
            self.base
            + self.token * load.num_tokens
            + (self.beyond * more if more > 0 else 0.0)
            + self.kv * load.kv_tokens
            + self.pair * load.prefill_pairs
            + self.seq * load.num_seqs
        )

    def pass_s(self, num_tokens: int, kept: int) -> float:
        return self.compaction

    def move_s(self, num_blocks: int) -> float:
        return self.move * num_blocks

    def save(self, path: Path) -> None:
        """Save as JSON. Raises: InvalidArgumentError."""
        whole = {"version": VERSION, "kind": type(self).__name__} | asdict(self)
        write_json(path, whole)

    @staticmethod
    def load(path: Path) -> Linear:
        """Load a cost model of either kind. Raises: InvalidArgumentError."""
        try:
            given = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"{path} cannot be read as the JSON of a calibration ({error}); make one with "
                "`kvreclaim calibrate-speed`."
            ) from None
        found = given if isinstance(given, dict) else {}
        kind = KINDS.get(str(found.get("kind")), Linear)
        names = {each.name for each in fields(kind)}
        numbers: dict[str, Any] = {name: found.get(name) for name in names - {"facts"} - LISTS}
        wrong = [name for name, value in numbers.items() if not _is_number(value)]
        lists: dict[str, Any] = {name: found.get(name) for name in names & LISTS}
        wrong += [name for name, value in lists.items() if not _are_numbers(value)]
        require(
            found.get("version") == VERSION and not wrong and set(found) == names | {"version", "kind"},
            f"{path} is no calibration of version {VERSION}"
            + (f" ({', '.join(sorted(wrong))} should be numbers)" if wrong else "")
            + "; make one with `kvreclaim calibrate-speed`.",
            "calibration",
        )
        numbers |= {name: tuple(value) for name, value in lists.items()}
        return kind(**numbers, facts=found["facts"])


@dataclass(frozen=True, slots=True, kw_only=True)
class WithExperts(Linear):
    """Linear, for a model with routed experts: more tokens touch more of them.

    dense:   seconds of reading all other weights, part of base
    experts: seconds of reading all experts; missed: share of them that one token does not visit
    flop:    seconds of computing one token's linear layers
    """

    dense: float
    experts: float
    missed: float
    flop: float

    def step_s(self, load: StepLoad) -> float:
        read = self.experts * (1.0 - self.missed**load.num_tokens)
        more = max(read, self.flop * load.num_tokens - self.dense)
        return (
            self.base
            + more
            + self.token * load.num_tokens
            + self.kv * load.kv_tokens
            + self.pair * load.prefill_pairs
            + self.seq * load.num_seqs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Linear):
    """Linear, plus a time by the number of tokens: kernels change with it, and pad to it.

    knots, more: numbers of tokens (ascending) and the seconds added there; linear between them
    """

    knots: tuple[float, ...]
    more: tuple[float, ...]

    def step_s(self, load: StepLoad) -> float:
        # Linear's own terms, here again: this is called for every step, and super() costs as much as they.
        tokens, knots, more = load.num_tokens, self.knots, self.more
        above = tokens - self.knee
        plain = (
            self.base
            + self.token * tokens
            + (self.beyond * above if above > 0 else 0.0)
            + self.kv * load.kv_tokens
            + self.pair * load.prefill_pairs
            + self.seq * load.num_seqs
        )
        at = bisect_right(knots, tokens)
        if at in (0, len(knots)):
            return plain + more[max(at - 1, 0)]
        low, high = knots[at - 1], knots[at]
        return plain + more[at - 1] + (more[at] - more[at - 1]) * (tokens - low) / (high - low)


KINDS = {each.__name__: each for each in (Linear, WithExperts, Stepped)}
LISTS = {"knots", "more"}


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(map(_is_number, values))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def load_of(
    rows: Iterable[Row], sequences: Mapping[int, ScheduledSequence], memory: MemoryManager
) -> StepLoad:
    """Between `schedule` and `done`: tables have the slots that were computed before."""
    num_tokens = num_seqs = keys = decodes = 0
    pairs = 0.0
    for row in rows:
        num_seqs += 1
        num_tokens += row.num_tokens
        held = memory.table(row.seq_id).physical_len
        if row.num_tokens == 1:
            keys += keys_read(sequences[row.seq_id], held + 1)
            decodes += 1
        else:
            pairs += row.num_tokens * (held + row.num_tokens / 2)
    return StepLoad(num_tokens, num_seqs, keys, pairs, decodes)


def keys_read(seq: ScheduledSequence, held: int) -> int:
    """Keys that one query reads in a sequence with `held` slots."""
    return min(held, seq.footprint.budget) if seq.reads_sparsely else held
