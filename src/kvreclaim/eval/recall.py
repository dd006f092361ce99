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
from kvreclaim.eval import vocabulary as v
from kvreclaim.eval.chain import Hop, walk_out
from kvreclaim.eval.example import Example, SizedTask, TokenKind, TraceWriter, check_room, in_header, scatter

ZONES = 3


@dataclass(frozen=True)
class RecallTask(SizedTask):
    """Carries of the walk, asked for at its end.

    num_tokens:   of the document, exact
    num_facts:    on the chain: START, then `num_facts` - 1 nodes, then END
    asked_per_zone: nodes asked about from each third of the walk
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
        """Tokens of a trace whose steps have `num_filler` filler words."""
        asked = ZONES * self.asked_per_zone
        return self.num_facts * (5 + num_filler) + asked * (4 + num_filler) + 1

    def draw(self, rng: random.Random, num_filler: int) -> Example:
        nodes = v.draw_nodes(rng, self.num_facts + self.num_decoys)
        path = [v.START, *nodes[: self.num_facts - 1], v.END]
        facts = [*pairwise(path), *pairwise(nodes[self.num_facts - 1 :])]
        carry, word = v.FIRST_CARRY + rng.randrange(v.NUM_CARRIES), v.draw_word(rng)
        follower = v.filler_cycle()
        num_body = self.num_tokens - self.num_trace_tokens(num_filler) - self._header_tokens
        body = scatter(rng, facts, num_body, follower, self.noise)
        asked = self._draw_asked(rng)
        header = [
            v.RECALL,
            *(path[i + 1] for i in asked),
            v.GO,
            v.FIRST_LENGTH + num_filler,
            v.START,
            carry,
            word,
            v.STOP,
        ]
        writer = TraceWriter(word, num_filler, follower)
        hops = walk_out(writer, path, carry, len(header))
        for number, i in enumerate(asked):
            _ask(writer, hops[i], number)
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
    writer.add(v.ASK_CARRY, TokenKind.MARK)
    writer.add(hop.value, TokenKind.ASKED, in_header(1 + number))
    writer.add(hop.next_carry, TokenKind.RESTORE, hop.next_carry_place)
    writer.close_step()
