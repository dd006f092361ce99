"""Tasks with queries listed in the header: `RECALL k k …`, `QUERY k k …` or `VARS c c …`, then `GO L8 … w .`

The trace answers the list in order and ends in `<eos>`. Everything else is a distractor.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import vocabulary as v
from kvreclaim.eval.chain import walk_out
from kvreclaim.eval.example import (
    Example,
    SizedTask,
    TokenKind,
    TraceWriter,
    check_room,
    in_fact,
    in_header,
    scatter,
)

ZONES = 3


def _header(task: int, listed: Sequence[int], num_filler: int, *start: int) -> list[int]:
    """Tokens after the facts: the list, then every random choice."""
    return [task, *listed, v.GO, v.FIRST_LENGTH + num_filler, *start, v.STOP]


@dataclass(frozen=True)
class RecallTask(SizedTask):
    """Recall with distractors: results from the start, the middle and the end of the trace.

    The trace walks the chain of facts out to END like the chain task, and then writes

        `! k c filler .`   the carry with which the walk reached k, which only the trace has

    for each listed node. A third of the listed nodes were reached in each third of the walk.

    num_tokens:   of the document, exact
    num_facts:    on the chain: START, then `num_facts` - 1 nodes, then END
    asked_per_zone: queried nodes from each third of the walk
    num_decoys:   facts that are not on the chain
    """

    num_tokens: int
    num_facts: int
    asked_per_zone: int = 3
    num_decoys: int = 6
    seeds = "recall:"

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the document can't hold."""
        super().__post_init__()
        if self.asked_per_zone < 1:
            raise InvalidArgumentError(f"asked_per_zone is {self.asked_per_zone}; it must be 1 or more")
        if self.num_facts - 1 < ZONES * self.asked_per_zone:
            raise InvalidArgumentError(
                f"num_facts is {self.num_facts}; asking {self.asked_per_zone} nodes of each third of the "
                f"walk needs at least {ZONES * self.asked_per_zone + 1}"
            )
        if self.num_decoys < 0 or self.num_facts + self.num_decoys > v.NUM_NODES:
            raise InvalidArgumentError(
                f"num_decoys is {self.num_decoys}; with num_facts {self.num_facts} it must be within "
                f"0..{v.NUM_NODES - self.num_facts}"
            )
        needed = self.num_trace_tokens(self.filler_words[1]) + self._header_tokens
        needed += 3 * (self.num_facts + self.num_decoys)
        check_room(self.num_tokens, needed)

    @property
    def _header_tokens(self) -> int:
        return 7 + ZONES * self.asked_per_zone

    def num_trace_tokens(self, num_filler: int) -> int:
        """Tokens of a trace with `num_filler` filler words per step."""
        queries = ZONES * self.asked_per_zone
        return self.num_facts * (5 + num_filler) + queries * (4 + num_filler) + 1

    def draw(self, rng: random.Random, num_filler: int) -> Example:
        nodes = v.draw_nodes(rng, self.num_facts + self.num_decoys)
        path = [v.START, *nodes[: self.num_facts - 1], v.END]
        facts = [*pairwise(path), *pairwise(nodes[self.num_facts - 1 :])]
        carry, word = v.FIRST_CARRY + rng.randrange(v.NUM_CARRIES), v.draw_word(rng)
        follower = v.filler_cycle()
        num_body = self.num_tokens - self.num_trace_tokens(num_filler) - self._header_tokens
        body = scatter(rng, facts, num_body, follower, self.noise)
        queries = self._draw_queries(rng)
        header = _header(v.RECALL, [path[i + 1] for i in queries], num_filler, v.START, carry, word)
        writer = TraceWriter(word, num_filler, follower)
        hops = walk_out(writer, path, carry, len(header))
        for number, i in enumerate(queries):
            writer.add(v.ASK_CARRY, TokenKind.MARK)
            writer.add(hops[i].value, TokenKind.ASKED, in_header(1 + number))
            writer.add(hops[i].next_carry, TokenKind.RESTORE, hops[i].next_carry_place)
            writer.close_step()
        return writer.finish(body, header)

    def _draw_queries(self, rng: random.Random) -> list[int]:
        """Return the queried hops, equally many from each third of the walk, in random order."""
        num_hops = self.num_facts - 1  # the last one reaches END, which is not a node
        cuts = [num_hops * i // ZONES for i in range(ZONES + 1)]
        queries = [
            i for begin, end in pairwise(cuts) for i in rng.sample(range(begin, end), self.asked_per_zone)
        ]
        return rng.sample(queries, len(queries))


@dataclass(frozen=True)
class MultiQueryTask(SizedTask):
    """Multi-query recall: many independent look-ups of facts `@ k v`, each judged by itself.

    The trace is `? k v filler .` for each listed key.

    num_tokens:   of the document, exact
    num_facts:    in the prompt, with different keys and different values
    num_asked:    queries
    """

    num_tokens: int
    num_facts: int
    num_asked: int
    seeds = "multi_query:"

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the document can't hold."""
        super().__post_init__()
        if not 2 <= self.num_facts <= v.NUM_NODES:
            raise InvalidArgumentError(f"num_facts is {self.num_facts}; it must be within 2..{v.NUM_NODES}")
        if not 1 <= self.num_asked <= self.num_facts:
            raise InvalidArgumentError(
                f"num_asked is {self.num_asked}; it must be within 1..{self.num_facts}, the number of facts"
            )
        trace, header = self.num_asked * (4 + self.filler_words[1]) + 1, 5 + self.num_asked
        check_room(self.num_tokens, trace + header + 3 * self.num_facts)

    def draw(self, rng: random.Random, num_filler: int) -> Example:
        nodes = v.draw_nodes(rng, self.num_facts)
        facts = list(zip(nodes, nodes[1:] + nodes[:1], strict=True))
        queries = rng.sample(range(self.num_facts), self.num_asked)
        word, follower = v.draw_word(rng), v.filler_cycle()
        header = _header(v.QUERY, [facts[i][0] for i in queries], num_filler, word)
        writer = TraceWriter(word, num_filler, follower)
        for number, i in enumerate(queries):
            writer.add(v.ASK_VALUE, TokenKind.MARK)
            writer.add(facts[i][0], TokenKind.ASKED, in_header(1 + number))
            writer.add(facts[i][1], TokenKind.LOOKUP, in_fact(i, 2))
            writer.close_step()
        return self.assemble(rng, writer, facts, header, self.num_tokens)


@dataclass(frozen=True)
class VariableTrackingTask(SizedTask):
    """Variable tracking: the variables that hold a value assigned along a chain.

    Source: the task of RULER (Hsieh et al. 2024), in the demo vocabulary. A value is one of c0 … c15, a
    variable is a node. `@ c k` assigns the value c to k, `@ j k` assigns j to k, and `@ k END` states that k
    was assigned to no other. The assignments of several chains are scattered over the prompt. The trace lists
    the variables that hold each listed value, `: c k k k END filler .` Each is read from an assignment that
    names the previous one.

    num_tokens:    of the document, exact
    num_chains:    assigned values
    num_asked:     queried values
    num_variables: (least, most) variables that hold a value, drawn for each
    """

    num_tokens: int
    num_chains: int
    num_asked: int
    num_variables: tuple[int, int]
    seeds = "variable_tracking:"

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the document can't hold."""
        super().__post_init__()
        if not 1 <= self.num_asked <= self.num_chains <= v.NUM_CARRIES:
            raise InvalidArgumentError(
                f"num_asked is {self.num_asked} and num_chains {self.num_chains}; they must be within "
                f"1..{v.NUM_CARRIES}, and num_asked at most num_chains"
            )
        least, most = self.num_variables
        if not 1 <= least <= most <= v.NUM_NODES // self.num_chains:
            raise InvalidArgumentError(
                f"num_variables is {self.num_variables}; with {self.num_chains} chains it must be "
                f"(least, most) within 1..{v.NUM_NODES // self.num_chains}"
            )
        needed = self.num_asked * (4 + most + self.filler_words[1]) + 6 + self.num_asked
        needed += 3 * self.num_chains * (most + 1)
        check_room(self.num_tokens, needed)

    def draw(self, rng: random.Random, num_filler: int) -> Example:
        values = [v.FIRST_CARRY + i for i in rng.sample(range(v.NUM_CARRIES), self.num_chains)]
        lengths = [rng.randint(*self.num_variables) for _ in values]
        nodes = iter(v.draw_nodes(rng, sum(lengths)))
        chains = [
            [value, *(next(nodes) for _ in range(n)), v.END] for value, n in zip(values, lengths, strict=True)
        ]
        queries = chains[: self.num_asked]  # the values are in random order
        facts = [edge for chain in chains for edge in pairwise(chain)]
        word, follower = v.draw_word(rng), v.filler_cycle()
        header = _header(v.VARS, [chain[0] for chain in queries], num_filler, word)
        writer = TraceWriter(word, num_filler, follower)
        fact = 0
        for number, chain in enumerate(queries):
            writer.add(v.LIST, TokenKind.MARK)
            writer.add(chain[0], TokenKind.ASKED, in_header(1 + number))
            for token in chain[1:]:
                writer.add(token, TokenKind.LOOKUP, in_fact(fact, 2))
                fact += 1
            writer.close_step()
        return self.assemble(rng, writer, facts, header, self.num_tokens)
