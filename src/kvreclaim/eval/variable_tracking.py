"""Variable tracking: which variables hold a value that was assigned along a chain.

Source: the task of RULER (Hsieh et al. 2024), in the demo vocabulary. A value is one of c0 … c15, a
variable is a node. `@ c k` assigns the value c to k, `@ j k` assigns j to k, and `@ k END` says that k was
assigned to no other. The assignments of several chains are scattered over the prompt in random order; its
header lists some of the values: `VARS c c … GO L8 w .` The trace lists the variables that hold each of them,

    `: c k k k END filler .`

and ends in `<eos>`. Each variable is read from an assignment that names the one before it.
"""

import random
from dataclasses import dataclass
from itertools import pairwise

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import vocabulary as v
from kvreclaim.eval.example import (
    Example,
    SizedTask,
    TokenKind,
    TraceWriter,
    check_room,
    in_fact,
    in_header,
)


@dataclass(frozen=True)
class VariableTrackingTask(SizedTask):
    """Chains of assignments.

    num_tokens:    of the document, exact
    num_chains:    values that are assigned
    num_asked:     of the values
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
        asked = chains[: self.num_asked]  # the values are in random order
        facts = [edge for chain in chains for edge in pairwise(chain)]
        header = [
            v.VARS,
            *(chain[0] for chain in asked),
            v.GO,
            v.FIRST_LENGTH + num_filler,
            (word := v.draw_word(rng)),
            v.STOP,
        ]
        follower = v.filler_cycle()
        writer = TraceWriter(word, num_filler, follower)
        fact = 0
        for number, chain in enumerate(asked):
            writer.add(v.LIST, TokenKind.MARK)
            writer.add(chain[0], TokenKind.ASKED, in_header(1 + number))
            for token in chain[1:]:
                writer.add(token, TokenKind.LOOKUP, in_fact(fact, 2))
                fact += 1
            writer.close_step()
        return self.assemble(rng, writer, facts, header, self.num_tokens)
