"""A task whose answers depend on far-away tokens: follow a chain of facts out and back.

The prompt is predictable filler with facts `@ k v` scattered in it and ends in a header
`GO L8 START c3 w .`, which names every random dial: filler words per hop, first carry, first word.
The trace walks the chain from START to END and returns:

    `# k v c filler .`   forward: v is looked up in the prompt, c = CARRY_TABLE[previous c][v]
    `< v k c filler .`   backward: c is the carry *before* the hop, which only earlier trace holds

and stops with `<eos>`. Each column of the table sends four carries to one, so a carry can't be inferred
from its successor: like the state that a returning recursion restores. One prompt, one right trace.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.example import (
    Example,
    Kind,
    Place,
    Stream,
    TraceWriter,
    accuracy,
    check_dials,
    in_fact,
    in_header,
    scatter,
)
from kvreclaim.eval.vocabulary import (
    BACKWARD,
    END,
    EOS,
    FIRST_CARRY,
    FIRST_LENGTH,
    FIRST_NODE,
    FORWARD,
    GO,
    NUM_CARRIES,
    NUM_NODES,
    START,
    STOP,
    draw_nodes,
    draw_word,
    filler_cycle,
)

NUM_CLASSES = 8  # a node's class is its number modulo this; END is one class more
HEADER_TOKENS = 6  # GO L START c w .
HOP_TOKENS = 5  # marker, two nodes, carry, stop; the filler comes on top


@dataclass(frozen=True)
class ChainTask:
    """Draw examples of one size; the same task and seed always give the same example.

    num_prompt_tokens: exact; what facts and header leave free is filler
    num_trace_tokens:  at most; the chain has as many facts as fit, so less than one hop pair is left over
    filler_words:      (least, most) filler words per hop, drawn per example and told by the header
    num_decoys:        facts that are not on the chain
    filler_seed:       which word follows which; the demo model knows 0 only, others serve calibration tests
    noise:             share of the prompt's filler that is runs of random nodes
    """

    num_prompt_tokens: int = 1152
    num_trace_tokens: int = 800
    filler_words: tuple[int, int] = (6, 10)
    num_decoys: int = 6
    filler_seed: int = 0
    noise: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the prompt can't hold."""
        least, most = self.filler_words
        check_dials(self.filler_words, self.noise)
        if self.num_decoys < 0:
            raise InvalidArgumentError(f"num_decoys is {self.num_decoys}; it must be 0 or more")
        if self.num_facts(most) < 1:
            raise InvalidArgumentError(
                f"num_trace_tokens is {self.num_trace_tokens}; one hop out and back with {most} filler words "
                f"takes {2 * (HOP_TOKENS + most) + 1}: raise it or lower filler_words"
            )
        num_facts = self.num_facts(least)
        if num_facts + self.num_decoys > NUM_NODES:
            raise InvalidArgumentError(
                f"num_trace_tokens {self.num_trace_tokens} and num_decoys {self.num_decoys} need "
                f"{num_facts + self.num_decoys} nodes of {NUM_NODES}: shorten the trace or raise filler_words"
            )
        needed = 3 * (num_facts + self.num_decoys) + HEADER_TOKENS
        if self.num_prompt_tokens < needed:
            raise InvalidArgumentError(
                f"num_prompt_tokens is {self.num_prompt_tokens}; {num_facts} facts on the chain and "
                f"{self.num_decoys} decoys need at least {needed}: raise it or shorten the trace"
            )

    def num_facts(self, num_filler: int) -> int:
        """Facts on the chain when a hop has `num_filler` words; each is walked twice, then comes `<eos>`."""
        return (self.num_trace_tokens - 1) // (2 * (HOP_TOKENS + num_filler))

    def sample(self, seed: int, stream: Stream = Stream.EVALUATION) -> Example:
        """Return the example of this seed."""
        rng = random.Random(f"{stream.value}:{seed}")
        num_filler = rng.randint(*self.filler_words)
        num_facts = self.num_facts(num_filler)
        nodes = draw_nodes(rng, num_facts + self.num_decoys)
        path = [START, *nodes[: num_facts - 1], END]
        facts = [*pairwise(path), *pairwise(nodes[num_facts - 1 :])]
        carry = FIRST_CARRY + rng.randrange(NUM_CARRIES)
        word = draw_word(rng)
        follower = filler_cycle(self.filler_seed)
        body = scatter(rng, facts, self.num_prompt_tokens - HEADER_TOKENS, follower, self.noise)
        header = [GO, FIRST_LENGTH + num_filler, START, carry, word, STOP]
        writer = TraceWriter(word, num_filler, follower)
        hops = walk_out(writer, path, carry, len(header))
        _walk_back(writer, hops)
        writer.add(EOS, Kind.MARK)
        return writer.finish(body, header)


@dataclass(frozen=True)
class Hop:
    """A forward hop as it was written: its two nodes and the carry before and after it, with their places."""

    key: int
    value: int
    carry: int
    next_carry: int
    key_place: Place
    value_place: Place
    carry_place: Place
    next_carry_place: Place


def walk_out(writer: TraceWriter, path: Sequence[int], carry: int, header_tokens: int) -> list[Hop]:
    """Write the forward hops along `path`, whose i-th edge is fact i, and return them.

    header_tokens: length of a header that ends in `START c w .`
    """
    place, carry_place = in_header(header_tokens - 4), in_header(header_tokens - 3)
    hops = []
    for i, (key, value) in enumerate(pairwise(path)):
        after = next_carry(carry, value)
        writer.add(FORWARD, Kind.MARK)
        key_place = writer.add(key, Kind.KEY, place)
        place = writer.add(value, Kind.LOOKUP, in_fact(i, 2))
        after_place = writer.add(after, Kind.CARRY)
        writer.close_step()
        hops.append(Hop(key, value, carry, after, key_place, place, carry_place, after_place))
        carry, carry_place = after, after_place
    return hops


def _walk_back(writer: TraceWriter, hops: Sequence[Hop]) -> None:
    """Write the backward hops, last one first."""
    place = hops[-1].value_place
    for hop in reversed(hops):
        writer.add(BACKWARD, Kind.MARK)
        writer.add(hop.value, Kind.KEY, place)
        place = writer.add(hop.key, Kind.RETURN, hop.key_place)
        writer.add(hop.carry, Kind.RESTORE, hop.carry_place)
        writer.close_step()


def _carry_table() -> tuple[tuple[int, ...], ...]:
    """Build the table [carry][class] -> carry, numbers not ids; a column has four carries four times."""
    rng = random.Random("carry table")
    columns = []
    for _ in range(NUM_CLASSES + 1):
        column = rng.sample(range(NUM_CARRIES), NUM_CARRIES // 4) * 4
        rng.shuffle(column)
        columns.append(column)
    return tuple(zip(*columns, strict=True))


CARRY_TABLE = _carry_table()


def next_carry(carry: int, node: int) -> int:
    """Return the carry (a token id) after a forward hop to `node` (a token id; END too)."""
    node_class = NUM_CLASSES if node == END else (node - FIRST_NODE) % NUM_CLASSES
    return FIRST_CARRY + CARRY_TABLE[carry - FIRST_CARRY][node_class]


def calibration_documents(num: int, seed: int = 0, task: ChainTask | None = None) -> list[tuple[int, ...]]:
    """Return `num` documents (prompt and trace) that evaluation never draws; seeds seed .. seed + num - 1."""
    task = task or ChainTask()
    return [task.sample(seed + i, Stream.CALIBRATION).document for i in range(num)]


def lookup_accuracy(example: Example, predicted: Sequence[int]) -> float:
    """Share of right successors in forward hops (teacher-forced, see `accuracy`): evidence in the prompt."""
    return accuracy(example, predicted, (Kind.LOOKUP,))


def carry_accuracy(example: Example, predicted: Sequence[int]) -> float:
    """Share of right carries in backward hops (teacher-forced, see `accuracy`): evidence in the far trace."""
    return accuracy(example, predicted, (Kind.RESTORE,))
