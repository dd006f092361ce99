"""Multi-query recall: many independent look-ups in the prompt, each right or wrong by itself.

The prompt holds facts `@ k v` and ends in a header that lists what is asked: `QUERY k k … GO L8 w .`
The trace is `? k v filler .` for each listed key, then `<eos>`. Facts that are not asked are distractors.
"""

import random
from dataclasses import dataclass

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
class MultiQueryTask(SizedTask):
    """Many look-ups of facts.

    num_tokens:   of the document, exact
    num_facts:    in the prompt, with different keys and different values
    num_asked:    of the facts
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
        asked = rng.sample(range(self.num_facts), self.num_asked)
        word, follower = v.draw_word(rng), v.filler_cycle()
        header = [v.QUERY, *(facts[i][0] for i in asked), v.GO, v.FIRST_LENGTH + num_filler, word, v.STOP]
        writer = TraceWriter(word, num_filler, follower)
        for number, i in enumerate(asked):
            writer.add(v.ASK_VALUE, TokenKind.MARK)
            writer.add(facts[i][0], TokenKind.ASKED, in_header(1 + number))
            writer.add(facts[i][1], TokenKind.LOOKUP, in_fact(i, 2))
            writer.close_step()
        return self.assemble(rng, writer, facts, header, self.num_tokens)
