"""The demo model's 265 words, one token each, and the filler of its documents.

The first 256 words are those of the chain task, so that its documents never change; words of other tasks
follow.
"""

import random

NUM_LENGTHS = 16
NUM_CARRIES = 16
NUM_NODES = 64

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
    *("RECALL", "QUERY", "VARS", "WALK", "!", "?", ":", "=", "^"),
)
TOKEN_IDS = {token: i for i, token in enumerate(TOKENS)}
PAD, EOS, UNK, FACT, FORWARD, BACKWARD, STOP, GO, START, END = range(10)
FIRST_LENGTH = TOKEN_IDS["L0"]
FIRST_CARRY = TOKEN_IDS["c0"]
FIRST_NODE = TOKEN_IDS["k0"]
FIRST_FILLER = TOKEN_IDS[FILLER_WORDS[0]]
RECALL, QUERY, VARS, ASK_CARRY, ASK_VALUE, LIST = (
    TOKEN_IDS[token] for token in ("RECALL", "QUERY", "VARS", "!", "?", ":")
)


def draw_nodes(rng: random.Random, num: int) -> list[int]:
    """Return `num` different nodes (token ids) in random order."""
    return rng.sample(range(FIRST_NODE, FIRST_NODE + NUM_NODES), num)


def draw_word(rng: random.Random) -> int:
    """Return a filler word (token id)."""
    return FIRST_FILLER + rng.randrange(len(FILLER_WORDS))


def filler_cycle(seed: int = 0) -> dict[int, int]:
    """Successor of each filler word: one cycle through all of them."""
    words = list(range(FIRST_FILLER, FIRST_FILLER + len(FILLER_WORDS)))
    random.Random(f"filler:{seed}").shuffle(words)
    return dict(zip(words, words[1:] + words[:1], strict=True))


def filler_run(word: int, num_words: int, follower: dict[int, int]) -> list[int]:
    """Return the `num_words` words that come after `word`."""
    words = []
    for _ in range(num_words):
        word = follower[word]
        words.append(word)
    return words
