"""Recall with distractors: what was worked out at the start, in the middle and at the end of the trace.

The prompt's header is `RECALL k k … GO L8 START c3 w .`: it lists the nodes that will be asked about. The
trace walks the chain of facts out to END like the chain task, and then writes

    `! k c filler .`   the carry with which the walk reached k, which only the trace holds

for each listed node, and `<eos>`. A third of the listed nodes were reached in each third of the walk; the
carries of all others, and the decoy facts, are distractors.
"""

import random
from dataclasses import dataclass
from itertools import pairwise

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.chain import Hop, walk_out
from kvreclaim.eval.example import Example, Kind, Stream, TraceWriter, check_dials, in_header, scatter
from kvreclaim.eval.vocabulary import (
    ASK_CARRY,
    END,
    EOS,
    FIRST_CARRY,
    FIRST_LENGTH,
    GO,
    NUM_CARRIES,
    NUM_NODES,
    RECALL,
    START,
    STOP,
    draw_nodes,
    draw_word,
    filler_cycle,
)

ZONES = 3


@dataclass(frozen=True)
class RecallTask:
    """Draw examples of one size; the same task and seed always give the same example.

    num_tokens:   of the document, exact
    num_facts:    on the chain: START, then `num_facts` - 1 nodes, then END
    asked_per_zone: nodes asked about from each third of the walk
    filler_words: (least, most) filler words per step, drawn per example and told by the header
    num_decoys:   facts that are not on the chain
    noise:        share of the prompt's filler that is runs of random nodes
    """

    num_tokens: int
    num_facts: int
    asked_per_zone: int = 3
    filler_words: tuple[int, int] = (6, 10)
    num_decoys: int = 6
    noise: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the document can't hold."""
        check_dials(self.filler_words, self.noise)
        if self.asked_per_zone < 1:
            raise InvalidArgumentError(f"asked_per_zone is {self.asked_per_zone}; it must be 1 or more")
        if self.num_facts - 1 < ZONES * self.asked_per_zone:
            raise InvalidArgumentError(
                f"num_facts is {self.num_facts}; asking {self.asked_per_zone} nodes of each third of the "
                f"walk needs at least {ZONES * self.asked_per_zone + 1}"
            )
        if self.num_decoys < 0 or self.num_facts + self.num_decoys > NUM_NODES:
            raise InvalidArgumentError(
                f"num_decoys is {self.num_decoys}; with num_facts {self.num_facts} it must be within "
                f"0..{NUM_NODES - self.num_facts}"
            )
        needed = self.num_trace_tokens(self.filler_words[1]) + self._header_tokens
        needed += 3 * (self.num_facts + self.num_decoys)
        if self.num_tokens < needed:
            raise InvalidArgumentError(f"num_tokens is {self.num_tokens}; these dials need {needed} or more")

    @property
    def _header_tokens(self) -> int:
        return 7 + ZONES * self.asked_per_zone

    def num_trace_tokens(self, num_filler: int) -> int:
        """Tokens of a trace whose steps have `num_filler` filler words."""
        asked = ZONES * self.asked_per_zone
        return self.num_facts * (5 + num_filler) + asked * (4 + num_filler) + 1

    def sample(self, seed: int, stream: Stream = Stream.EVALUATION) -> Example:
        """Return the example of this seed."""
        rng = random.Random(f"recall:{stream.value}:{seed}")
        num_filler = rng.randint(*self.filler_words)
        nodes = draw_nodes(rng, self.num_facts + self.num_decoys)
        path = [START, *nodes[: self.num_facts - 1], END]
        facts = [*pairwise(path), *pairwise(nodes[self.num_facts - 1 :])]
        carry, word = FIRST_CARRY + rng.randrange(NUM_CARRIES), draw_word(rng)
        follower = filler_cycle()
        num_body = self.num_tokens - self.num_trace_tokens(num_filler) - self._header_tokens
        body = scatter(rng, facts, num_body, follower, self.noise)
        asked = self._draw_asked(rng)
        header = [
            RECALL,
            *(path[i + 1] for i in asked),
            GO,
            FIRST_LENGTH + num_filler,
            START,
            carry,
            word,
            STOP,
        ]
        writer = TraceWriter(word, num_filler, follower)
        hops = walk_out(writer, path, carry, len(header))
        for number, i in enumerate(asked):
            _ask(writer, hops[i], number)
        writer.add(EOS, Kind.MARK)
        return writer.finish(body, header)

    def _draw_asked(self, rng: random.Random) -> list[int]:
        """Return the hops asked about, as many from each third of the walk, in random order."""
        num_hops = self.num_facts - 1  # the last one reaches END, which is no node
        cuts = [num_hops * i // ZONES for i in range(ZONES + 1)]
        asked = [
            i for begin, end in pairwise(cuts) for i in rng.sample(range(begin, end), self.asked_per_zone)
        ]
        return rng.sample(asked, len(asked))


def _ask(writer: TraceWriter, hop: Hop, number: int) -> None:
    """Write one question, the `number`-th of the header's list, and its answer."""
    writer.add(ASK_CARRY, Kind.MARK)
    writer.add(hop.value, Kind.ASKED, in_header(1 + number))
    writer.add(hop.next_carry, Kind.RESTORE, hop.next_carry_place)
    writer.close_step()
