"""Multi-query recall: many independent look-ups in the prompt, each right or wrong by itself.

The prompt holds facts `@ k v` and ends in a header that lists what is asked: `QUERY k k … GO L8 w .`
The trace is `? k v filler .` for each listed key, then `<eos>`. Facts that are not asked are distractors.
"""

import random
from dataclasses import dataclass

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
    ASK_VALUE,
    EOS,
    FIRST_LENGTH,
    GO,
    NUM_NODES,
    QUERY,
    STOP,
    draw_nodes,
    draw_word,
    filler_cycle,
)


@dataclass(frozen=True)
class MultiQueryTask:
    """Draw examples of one size; the same task and seed always give the same example.

    num_tokens:   of the document, exact
    num_facts:    in the prompt, with different keys and different values
    num_asked:    of the facts
    filler_words: (least, most) filler words per step, drawn per example and told by the header
    noise:        share of the prompt's filler that is runs of random nodes
    """

    num_tokens: int
    num_facts: int
    num_asked: int
    filler_words: tuple[int, int] = (6, 10)
    noise: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the document can't hold."""
        check_dials(self.filler_words, self.noise)
        if not 2 <= self.num_facts <= NUM_NODES:
            raise InvalidArgumentError(f"num_facts is {self.num_facts}; it must be within 2..{NUM_NODES}")
        if not 1 <= self.num_asked <= self.num_facts:
            raise InvalidArgumentError(
                f"num_asked is {self.num_asked}; it must be within 1..{self.num_facts}, the number of facts"
            )
        needed = self.num_trace_tokens(self.filler_words[1]) + self._header_tokens + 3 * self.num_facts
        if self.num_tokens < needed:
            raise InvalidArgumentError(f"num_tokens is {self.num_tokens}; these dials need {needed} or more")

    @property
    def _header_tokens(self) -> int:
        return 5 + self.num_asked

    def num_trace_tokens(self, num_filler: int) -> int:
        """Tokens of a trace whose steps have `num_filler` filler words."""
        return self.num_asked * (4 + num_filler) + 1

    def sample(self, seed: int, stream: Stream = Stream.EVALUATION) -> Example:
        """Return the example of this seed."""
        rng = random.Random(f"multi_query:{stream.value}:{seed}")
        num_filler = rng.randint(*self.filler_words)
        nodes = draw_nodes(rng, self.num_facts)
        facts = list(zip(nodes, nodes[1:] + nodes[:1], strict=True))
        asked = rng.sample(range(self.num_facts), self.num_asked)
        word, follower = draw_word(rng), filler_cycle()
        num_body = self.num_tokens - self.num_trace_tokens(num_filler) - self._header_tokens
        body = scatter(rng, facts, num_body, follower, self.noise)
        header = [QUERY, *(facts[i][0] for i in asked), GO, FIRST_LENGTH + num_filler, word, STOP]
        writer = TraceWriter(word, num_filler, follower)
        for number, i in enumerate(asked):
            writer.add(ASK_VALUE, Kind.MARK)
            writer.add(facts[i][0], Kind.ASKED, in_header(1 + number))
            writer.add(facts[i][1], Kind.LOOKUP, in_fact(i, 2))
            writer.close_step()
        writer.add(EOS, Kind.MARK)
        return writer.finish(body, header)
