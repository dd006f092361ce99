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
from kvreclaim.eval.example import (
    Example,
    Kind,
    Stream,
    TraceWriter,
    check_dials,
    in_fact,
    in_header,
    scatter,
)
from kvreclaim.eval.vocabulary import (
    END,
    EOS,
    FIRST_CARRY,
    FIRST_LENGTH,
    GO,
    LIST,
    NUM_CARRIES,
    NUM_NODES,
    STOP,
    VARS,
    draw_nodes,
    draw_word,
    filler_cycle,
)


@dataclass(frozen=True)
class VariableTrackingTask:
    """Draw examples of one size; the same task and seed always give the same example.

    num_tokens:    of the document, exact
    num_chains:    values that are assigned
    num_asked:     of the values
    num_variables: (least, most) variables that hold a value, drawn for each
    filler_words:  (least, most) filler words per step, drawn per example and told by the header
    noise:         share of the prompt's filler that is runs of random nodes
    """

    num_tokens: int
    num_chains: int
    num_asked: int
    num_variables: tuple[int, int]
    filler_words: tuple[int, int] = (6, 10)
    noise: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the document can't hold."""
        check_dials(self.filler_words, self.noise)
        if not 1 <= self.num_asked <= self.num_chains <= NUM_CARRIES:
            raise InvalidArgumentError(
                f"num_asked is {self.num_asked} and num_chains {self.num_chains}; they must be within "
                f"1..{NUM_CARRIES}, and num_asked at most num_chains"
            )
        least, most = self.num_variables
        if not 1 <= least <= most <= NUM_NODES // self.num_chains:
            raise InvalidArgumentError(
                f"num_variables is {self.num_variables}; with {self.num_chains} chains it must be "
                f"(least, most) within 1..{NUM_NODES // self.num_chains}"
            )
        needed = self.num_asked * (4 + most + self.filler_words[1]) + 6 + self.num_asked
        needed += 3 * self.num_chains * (most + 1)
        if self.num_tokens < needed:
            raise InvalidArgumentError(f"num_tokens is {self.num_tokens}; these dials need {needed} or more")

    def sample(self, seed: int, stream: Stream = Stream.EVALUATION) -> Example:
        """Return the example of this seed."""
        rng = random.Random(f"variable_tracking:{stream.value}:{seed}")
        num_filler = rng.randint(*self.filler_words)
        values = [FIRST_CARRY + i for i in rng.sample(range(NUM_CARRIES), self.num_chains)]
        lengths = [rng.randint(*self.num_variables) for _ in values]
        nodes = iter(draw_nodes(rng, sum(lengths)))
        chains = [
            [value, *(next(nodes) for _ in range(n)), END] for value, n in zip(values, lengths, strict=True)
        ]
        asked = chains[: self.num_asked]  # the values are in random order
        facts = [edge for chain in chains for edge in pairwise(chain)]
        header = [
            VARS,
            *(chain[0] for chain in asked),
            GO,
            FIRST_LENGTH + num_filler,
            (word := draw_word(rng)),
            STOP,
        ]
        follower = filler_cycle()
        writer = TraceWriter(word, num_filler, follower)
        fact = 0
        for number, chain in enumerate(asked):
            writer.add(LIST, Kind.MARK)
            writer.add(chain[0], Kind.ASKED, in_header(1 + number))
            for token in chain[1:]:
                writer.add(token, Kind.LOOKUP, in_fact(fact, 2))
                fact += 1
            writer.close_step()
        writer.add(EOS, Kind.MARK)
        num_body = self.num_tokens - len(writer.tokens) - len(header)
        return writer.finish(scatter(rng, facts, num_body, follower, self.noise), header)
