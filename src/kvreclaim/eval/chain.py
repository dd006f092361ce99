"""A task whose answers depend on far-away tokens: follow a chain of facts out and back.

The prompt is predictable filler with facts `@ k v` scattered in it and ends in a header
`GO L8 START c3 w .`, which names every random dial: filler words per hop, first carry, first word.
The trace walks the chain from START to END and returns:

    `# k v c filler .`   forward: v is looked up in the prompt, c = CARRY_TABLE[previous c][v]
    `< v k c filler .`   backward: c is the carry *before* the hop, which only earlier trace holds

and stops with `<eos>`. Each column of the table sends four carries to one, so a carry can't be inferred
from its successor: like the state that a returning recursion restores. One prompt, one right trace.
"""

import enum
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvreclaim.errors import InvalidArgumentError

NUM_LENGTHS = 16
NUM_CARRIES = 16
NUM_NODES = 64
NUM_CLASSES = 8  # a node's class is its number modulo this; END is one class more

_WORDS = (
    "acorn alder apple ash aster barley basil bay bead beech bell berry birch bird bloom bog bough "
    "brook bud calm cave cedar cherry clay cliff cloud clover coal coast corn cove crag creek cress "
    "crow daisy dale dawn deer dew dove duck dune dusk eagle earth elm fern field finch fir fish fjord "
    "flint foam fog ford fox frog frost gale glade glen goose grain grape grass grove gulf hail hare "
    "hawk haze hazel heath heron hill holly honey ice iris isle ivy kelp lake lark leaf lemon lilac "
    "lily lotus maple marsh mead mint mist mole moon moor moss nest nut oak olive ore otter owl path "
    "peach peak pear pebble pine plum pond poppy quail rain reed reef ridge river rock root rose rye "
    "sage sand sea seal seed shade shell shore sky sleet slope snow soil spring star stone storm sun "
    "surf tide vale wave wind wood"
)
FILLER_WORDS = tuple(_WORDS.split())

TOKENS = (
    *("<pad>", "<eos>", "<unk>", "@", "#", "<", ".", "GO", "START", "END"),
    *(f"L{i}" for i in range(NUM_LENGTHS)),
    *(f"c{i}" for i in range(NUM_CARRIES)),
    *(f"k{i}" for i in range(NUM_NODES)),
    *FILLER_WORDS,
)
TOKEN_IDS = {token: i for i, token in enumerate(TOKENS)}
PAD, EOS, UNK, FACT, FORWARD, BACKWARD, STOP, GO, START, END = range(10)
FIRST_LENGTH = TOKEN_IDS["L0"]
FIRST_CARRY = TOKEN_IDS["c0"]
FIRST_NODE = TOKEN_IDS["k0"]
FIRST_FILLER = TOKEN_IDS[FILLER_WORDS[0]]

HEADER_TOKENS = 6  # GO L START c w .
HOP_TOKENS = 5  # marker, two nodes, carry, stop; the filler comes on top


class Kind(enum.Enum):
    """What it takes to predict a token of the trace."""

    MARK = "mark"  # `#`, `<` or `<eos>`: which way the walk goes
    KEY = "key"  # the node where the last hop ended, copied
    LOOKUP = "lookup"  # the successor in a forward hop: only the prompt has it
    CARRY = "carry"  # the carry of a forward hop: the last carry and the node before it
    RETURN = "return"  # the predecessor in a backward hop: prompt or earlier trace
    RESTORE = "restore"  # the carry of a backward hop: only the far-back trace has it
    FIRST = "first"  # a hop's first filler word: goes on after the last hop's last one
    FILLER = "filler"  # follows from the word before it
    STOP = "stop"  # `.`: counts filler words


class Stream(enum.Enum):
    """Families of seeds: no two of them ever draw the same random numbers."""

    EVALUATION = "evaluation"
    CALIBRATION = "calibration"
    TRAINING = "training"


@dataclass(frozen=True)
class ChainExample:
    """One prompt with the only right continuation; `kinds` is aligned with `trace`."""

    prompt: tuple[int, ...]
    trace: tuple[int, ...]
    kinds: tuple[Kind, ...]

    @property
    def document(self) -> tuple[int, ...]:
        """Prompt and trace as one token list."""
        return self.prompt + self.trace


@dataclass(frozen=True)
class ChainTask:
    """Draw examples of one size; the same task and seed always give the same example.

    num_prompt_tokens: exact; what facts and header leave free is filler
    num_trace_tokens:  at most; the chain has as many facts as fit, so less than one hop pair is left over
    filler_words:      (least, most) filler words per hop, drawn per example and told by the header
    num_decoys:        facts that are not on the chain
    filler_seed:       which word follows which; the demo model knows 0 only, others serve calibration tests
    """

    num_prompt_tokens: int = 1152
    num_trace_tokens: int = 800
    filler_words: tuple[int, int] = (6, 10)
    num_decoys: int = 6
    filler_seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the prompt can't hold."""
        least, most = self.filler_words
        if not 1 <= least <= most < NUM_LENGTHS:
            raise InvalidArgumentError(
                f"filler_words is {self.filler_words}; it must be (least, most) within 1..{NUM_LENGTHS - 1}"
            )
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

    def sample(self, seed: int, stream: Stream = Stream.EVALUATION) -> ChainExample:
        """Return the example of this seed."""
        rng = random.Random(f"{stream.value}:{seed}")
        follower = _filler_cycle(self.filler_seed)
        num_filler = rng.randint(*self.filler_words)
        num_facts = self.num_facts(num_filler)
        nodes = rng.sample(range(FIRST_NODE, FIRST_NODE + NUM_NODES), num_facts + self.num_decoys)
        path = [START, *nodes[: num_facts - 1], END]
        decoys = nodes[num_facts - 1 :]
        facts = [*pairwise(path), *pairwise(decoys)]
        carry = FIRST_CARRY + rng.randrange(NUM_CARRIES)
        word = FIRST_FILLER + rng.randrange(len(FILLER_WORDS))
        body = _scatter(rng, facts, self.num_prompt_tokens - HEADER_TOKENS, follower)
        header = [GO, FIRST_LENGTH + num_filler, START, carry, word, STOP]
        trace, kinds = _walk(path, carry, word, num_filler, follower)
        return ChainExample(tuple(body + header), tuple(trace), tuple(kinds))


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


def _filler_cycle(seed: int) -> dict[int, int]:
    """Which filler word follows which: one cycle through all of them."""
    words = list(range(FIRST_FILLER, FIRST_FILLER + len(FILLER_WORDS)))
    random.Random(f"filler:{seed}").shuffle(words)
    return dict(zip(words, words[1:] + words[:1], strict=True))


def _run(word: int, num_words: int, follower: dict[int, int]) -> list[int]:
    """Return the `num_words` words that come after `word`."""
    words = []
    for _ in range(num_words):
        word = follower[word]
        words.append(word)
    return words


def _scatter(
    rng: random.Random, facts: list[tuple[int, int]], num_tokens: int, follower: dict[int, int]
) -> list[int]:
    """Spread the facts, in random order, over `num_tokens` tokens of filler runs with random starts."""
    facts = rng.sample(facts, len(facts))
    num_filler = num_tokens - 3 * len(facts)
    cuts = [0, *sorted(rng.randint(0, num_filler) for _ in facts), num_filler]
    body: list[int] = []
    for i, (begin, end) in enumerate(pairwise(cuts)):
        body += _run(FIRST_FILLER + rng.randrange(len(FILLER_WORDS)), end - begin, follower)
        if i < len(facts):
            body += [FACT, *facts[i]]
    return body


def _walk(
    path: list[int], carry: int, word: int, num_filler: int, follower: dict[int, int]
) -> tuple[list[int], list[Kind]]:
    """Return the trace along `path` and back, and the kind of each of its tokens."""
    tail = [Kind.FIRST, *[Kind.FILLER] * (num_filler - 1), Kind.STOP]
    out = [Kind.MARK, Kind.KEY, Kind.LOOKUP, Kind.CARRY, *tail]
    back = [Kind.MARK, Kind.KEY, Kind.RETURN, Kind.RESTORE, *tail]
    carries = [carry]
    for node in path[1:]:
        carries.append(next_carry(carries[-1], node))
    hops = [(FORWARD, *edge) for edge in zip(path, path[1:], carries[1:], strict=False)]
    hops += reversed([(BACKWARD, v, k, c) for k, v, c in zip(path, path[1:], carries, strict=False)])
    trace: list[int] = []
    for hop in hops:
        words = _run(word, num_filler, follower)
        word = words[-1]
        trace += [*hop, *words, STOP]
    num_facts = len(path) - 1
    return [*trace, EOS], [*out * num_facts, *back * num_facts, Kind.MARK]


def calibration_documents(num: int, seed: int = 0, task: ChainTask | None = None) -> list[tuple[int, ...]]:
    """Return `num` documents (prompt and trace) that evaluation never draws; seeds seed .. seed + num - 1."""
    task = task or ChainTask()
    return [task.sample(seed + i, Stream.CALIBRATION).document for i in range(num)]


def accuracy(example: ChainExample, predicted: Sequence[int], kinds: Collection[Kind]) -> float:
    """Return the share of the trace's tokens of these kinds that are right.

    predicted: teacher-forced argmax, aligned with the trace: `predicted[i]` is the guess for `trace[i]`,
               made after the prompt and the gold `trace[:i]`
    """
    if len(predicted) != len(example.trace):
        raise InvalidArgumentError(
            f"got {len(predicted)} predictions for {len(example.trace)} tokens of trace; give one for each"
        )
    triples = zip(example.trace, predicted, example.kinds, strict=True)
    right = [gold == guess for gold, guess, kind in triples if kind in kinds]
    if not right:
        raise InvalidArgumentError(f"no token of the trace is of the kinds {sorted(k.value for k in kinds)}")
    return sum(right) / len(right)


def lookup_accuracy(example: ChainExample, predicted: Sequence[int]) -> float:
    """Share of right successors in forward hops (teacher-forced, see `accuracy`): evidence in the prompt."""
    return accuracy(example, predicted, (Kind.LOOKUP,))


def carry_accuracy(example: ChainExample, predicted: Sequence[int]) -> float:
    """Share of right carries in backward hops (teacher-forced, see `accuracy`): evidence in the far trace."""
    return accuracy(example, predicted, (Kind.RESTORE,))


def progress(example: ChainExample, generated: Sequence[int]) -> float:
    """Return the fraction of the trace that was generated before the first error; the rest is ignored."""
    num_right = 0
    for gold, token in zip(example.trace, generated, strict=False):
        if gold != token:
            break
        num_right += 1
    return num_right / len(example.trace)


def exact_match(example: ChainExample, generated: Sequence[int]) -> bool:
    """Whether the whole trace was generated, `<eos>` included; what follows `<eos>` is ignored."""
    return tuple(generated[: len(example.trace)]) == example.trace
