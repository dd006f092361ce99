"""A task with answers that depend on far-away tokens: follow a chain of facts out and back.

The prompt is predictable filler with facts `@ k v` scattered in it and ends in a header
`GO L8 START c3 w .`, which gives every random choice: filler words per hop, first carry, first word.
The trace walks the chain from START to END and returns:

    `# k v c filler .`   forward: v is looked up in the prompt, c = CARRY_TABLE[previous c][v]
    `< v k c filler .`   backward: c is the carry *before* the hop, which only the earlier trace has

and stops with `<eos>`. Each column of the table maps four carries to one, so a carry can't be inferred
from its successor: like the state that a returning recursion restores. One prompt, one correct trace.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import vocabulary as v
from kvreclaim.eval.example import (
    EvidencePlace,
    Example,
    SizedTask,
    TokenKind,
    TraceWriter,
    accuracy,
    in_fact,
    in_header,
    scatter,
)

NUM_CLASSES = 8  # a node's class is its number modulo this; END is one class more
HEADER_TOKENS = 6  # GO L START c w .
HOP_TOKENS = 5  # marker, two nodes, carry, stop; the filler comes on top


@dataclass(frozen=True)
class ChainTask(SizedTask):
    """A chain of facts, out and back.

    num_prompt_tokens: exact; the space left by facts and header is filler
    num_trace_tokens:  at most; the chain has as many facts as fit, so less than one hop pair is left over
    num_decoys:        facts that are not on the chain
    filler_seed:       the order of filler words; the demo model knows only 0, others serve calibration tests
    """

    num_prompt_tokens: int = 1152
    num_trace_tokens: int = 800
    num_decoys: int = 6
    filler_seed: int = 0
    seeds = ""

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the prompt can't hold."""
        least, most = self.filler_words
        super().__post_init__()
        if self.num_decoys < 0:
            raise InvalidArgumentError(f"num_decoys is {self.num_decoys}; it must be 0 or more")
        if self.num_facts(most) < 1:
            raise InvalidArgumentError(
                f"num_trace_tokens is {self.num_trace_tokens}; one hop out and back with {most} filler words "
                f"takes {2 * (HOP_TOKENS + most) + 1}: raise it or lower filler_words"
            )
        num_facts = self.num_facts(least)
        if num_facts + self.num_decoys > v.NUM_NODES:
            raise InvalidArgumentError(
                f"num_trace_tokens {self.num_trace_tokens} and num_decoys {self.num_decoys} need "
                f"{num_facts + self.num_decoys} nodes of {v.NUM_NODES}: shorten the trace or raise "
                "filler_words"
            )
        needed = 3 * (num_facts + self.num_decoys) + HEADER_TOKENS
        if self.num_prompt_tokens < needed:
            raise InvalidArgumentError(
                f"num_prompt_tokens is {self.num_prompt_tokens}; {num_facts} facts on the chain and "
                f"{self.num_decoys} decoys need at least {needed}: raise it or shorten the trace"
            )

    def num_facts(self, num_filler: int) -> int:
        """Facts on the chain if a hop has `num_filler` words; each is walked twice, then comes `<eos>`."""
        return (self.num_trace_tokens - 1) // (2 * (HOP_TOKENS + num_filler))

    def draw(self, rng: random.Random, num_filler: int) -> Example:
        num_facts = self.num_facts(num_filler)
        nodes = v.draw_nodes(rng, num_facts + self.num_decoys)
        path = [v.START, *nodes[: num_facts - 1], v.END]
        facts = [*pairwise(path), *pairwise(nodes[num_facts - 1 :])]
        carry = v.FIRST_CARRY + rng.randrange(v.NUM_CARRIES)
        word = v.draw_word(rng)
        follower = v.filler_cycle(self.filler_seed)
        body = scatter(rng, facts, self.num_prompt_tokens - HEADER_TOKENS, follower, self.noise)
        header = [v.GO, v.FIRST_LENGTH + num_filler, v.START, carry, word, v.STOP]
        writer = TraceWriter(word, num_filler, follower)
        hops = walk_out(writer, path, carry, len(header))
        _walk_back(writer, hops)
        return writer.finish(body, header)


@dataclass(frozen=True)
class Hop:
    """A written forward hop: its two nodes and the carry before and after it, with their places."""

    key: int
    value: int
    carry: int
    next_carry: int
    key_place: EvidencePlace
    value_place: EvidencePlace
    carry_place: EvidencePlace
    next_carry_place: EvidencePlace


def walk_out(writer: TraceWriter, path: Sequence[int], carry: int, header_tokens: int) -> list[Hop]:
    """Write the forward hops along `path`, whose i-th edge is fact i, and return them.

    header_tokens: length of a header that ends in `START c w .`
    """
    place, carry_place = in_header(header_tokens - 4), in_header(header_tokens - 3)
    hops = []
    for i, (key, value) in enumerate(pairwise(path)):
        after = next_carry(carry, value)
        writer.add(v.FORWARD, TokenKind.MARK)
        key_place = writer.add(key, TokenKind.KEY, place)
        place = writer.add(value, TokenKind.LOOKUP, in_fact(i, 2))
        after_place = writer.add(after, TokenKind.CARRY)
        writer.close_step()
        hops.append(Hop(key, value, carry, after, key_place, place, carry_place, after_place))
        carry, carry_place = after, after_place
    return hops


def _walk_back(writer: TraceWriter, hops: Sequence[Hop]) -> None:
    """Write the backward hops, last one first."""
    place = hops[-1].value_place
    for hop in reversed(hops):
        writer.add(v.BACKWARD, TokenKind.MARK)
        writer.add(hop.value, TokenKind.KEY, place)
        place = writer.add(hop.key, TokenKind.RETURN, hop.key_place)
        writer.add(hop.carry, TokenKind.RESTORE, hop.carry_place)
        writer.close_step()


def _carry_table() -> tuple[tuple[int, ...], ...]:
    """Build the table [carry][class] -> carry, numbers not ids; a column has four carries four times."""
    rng = random.Random("carry table")
    columns = []
    for _ in range(NUM_CLASSES + 1):
        column = rng.sample(range(v.NUM_CARRIES), v.NUM_CARRIES // 4) * 4
        rng.shuffle(column)
        columns.append(column)
    return tuple(zip(*columns, strict=True))


CARRY_TABLE = _carry_table()


def next_carry(carry: int, node: int) -> int:
    """Return the carry (a token id) after a forward hop to `node` (a token id; END too)."""
    node_class = NUM_CLASSES if node == v.END else (node - v.FIRST_NODE) % NUM_CLASSES
    return v.FIRST_CARRY + CARRY_TABLE[carry - v.FIRST_CARRY][node_class]


def lookup_accuracy(example: Example, predicted: Sequence[int]) -> float:
    """Share of correct successors in forward hops (teacher-forced, see `accuracy`)."""
    return accuracy(example, predicted, (TokenKind.LOOKUP,))
