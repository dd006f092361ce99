"""Training batches of the demo tasks, with their dials drawn at random."""

import random
from collections.abc import Sequence

import torch

from kvreclaim.eval.chain import HEADER_TOKENS, HOP_TOKENS, ChainTask
from kvreclaim.eval.example import Example, Stream, TokenKind
from kvreclaim.eval.list_tasks import ZONES, MultiQueryTask, RecallTask, VariableTrackingTask
from kvreclaim.eval.vocabulary import NUM_NODES

FILLER_WORDS = (1, 15)
TOKENS_PER_FILLER_WORD = 64  # short examples get little filler, so that most steps need a look-up (see below)
MAX_DECOYS = 20
TRACE_SHARE = (0.35, 0.65)
CLEAN_SHARE = 0.4  # of the examples: no nodes among the filler
MAX_NOISE = 0.4
HEAVY_KINDS = frozenset(
    {TokenKind.ASKED, TokenKind.LOOKUP, TokenKind.CARRY, TokenKind.RETURN, TokenKind.RESTORE}
)
HEAVY_WEIGHT = 3.0
KIND_NUMBERS = {kind: i for i, kind in enumerate(TokenKind)}


def _draw_filler(rng: random.Random, num_tokens: int) -> int:
    least, most = FILLER_WORDS
    return rng.randint(least, max(least, min(most, num_tokens // TOKENS_PER_FILLER_WORD)))


def _draw_noise(rng: random.Random) -> float:
    return 0.0 if rng.random() < CLEAN_SHARE else rng.uniform(0, MAX_NOISE)


def _draw_chain(rng: random.Random, num_tokens: int) -> ChainTask:
    num_filler = _draw_filler(rng, num_tokens)
    pair = 2 * (HOP_TOKENS + num_filler)
    num_facts = max(1, min(int(num_tokens * rng.uniform(*TRACE_SHARE)) // pair, NUM_NODES - MAX_DECOYS))
    num_prompt_tokens = num_tokens - num_facts * pair - 1
    free_tokens = num_prompt_tokens - HEADER_TOKENS - 3 * num_facts
    # Few facts teach tricks instead of look-ups: the one after START, the one before END, one not used up.
    return ChainTask(
        num_prompt_tokens=num_prompt_tokens,
        num_trace_tokens=num_facts * pair + 1,
        filler_words=(num_filler, num_filler),
        num_decoys=rng.randint(0, min(MAX_DECOYS, free_tokens // 3)),
        noise=_draw_noise(rng),
    )


def _draw_recall(rng: random.Random, num_tokens: int) -> RecallTask:
    num_filler = _draw_filler(rng, num_tokens)
    asked_per_zone = rng.randint(1, max(1, min(6, num_tokens // 96)))
    asked = ZONES * asked_per_zone
    room = int(num_tokens * rng.uniform(0.6, 0.9)) - 8 - asked * (5 + num_filler)
    num_facts = min(room // (8 + num_filler), NUM_NODES - MAX_DECOYS)
    while num_facts - 1 < ZONES * asked_per_zone:  # a long walk of few facts can't be asked about much
        asked_per_zone -= 1
        if not asked_per_zone:
            return _draw_recall(rng, num_tokens)
    free_tokens = num_tokens - num_facts * (8 + num_filler) - 8 - ZONES * asked_per_zone * (5 + num_filler)
    return RecallTask(
        num_tokens=num_tokens,
        num_facts=num_facts,
        asked_per_zone=asked_per_zone,
        filler_words=(num_filler, num_filler),
        num_decoys=rng.randint(0, min(MAX_DECOYS, free_tokens // 3)),
        noise=_draw_noise(rng),
    )


def _draw_multi_query(rng: random.Random, num_tokens: int) -> MultiQueryTask:
    num_filler = _draw_filler(rng, num_tokens)
    room = int(num_tokens * rng.uniform(0.5, 0.95)) - 6
    asked_share = rng.uniform(0.4, 1.0)
    num_facts = min(int(room / (3 + asked_share * (5 + num_filler))), NUM_NODES)
    return MultiQueryTask(
        num_tokens=num_tokens,
        num_facts=num_facts,
        num_asked=max(1, int(num_facts * asked_share)),
        filler_words=(num_filler, num_filler),
        noise=_draw_noise(rng),
    )


def _draw_variable_tracking(rng: random.Random, num_tokens: int) -> VariableTrackingTask:
    num_filler = _draw_filler(rng, num_tokens)
    num_chains = rng.randint(2, max(2, min(12, num_tokens // 64)))
    most = max(1, min(NUM_NODES // num_chains, 8, (num_tokens - 40) // (num_chains * 5)))
    num_asked = rng.randint(1, num_chains)
    while num_asked * (5 + most + num_filler) + 6 + 3 * num_chains * (most + 1) > num_tokens:
        num_asked, most = max(1, num_asked - 1), most if num_asked > 1 else most - 1
    return VariableTrackingTask(
        num_tokens=num_tokens,
        num_chains=num_chains,
        num_asked=num_asked,
        num_variables=(max(1, most // 2), most),
        filler_words=(num_filler, num_filler),
        noise=_draw_noise(rng),
    )


DRAW = {
    "chain": _draw_chain,
    "recall": _draw_recall,
    "multi_query": _draw_multi_query,
    "variable_tracking": _draw_variable_tracking,
}
"""Task name -> a task of exactly `num_tokens` tokens with random dials."""


def draw_example(rng: random.Random, task: str, num_tokens: int) -> Example:
    """Return an example of exactly `num_tokens` tokens."""
    return DRAW[task](rng, num_tokens).sample(rng.getrandbits(48), Stream.TRAINING)


def draw_batch(
    rng: random.Random, tasks: Sequence[str], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [N, T], a row for each task name, and kinds [N, T]: numbers, -1 in the prompt."""
    ids = torch.zeros(len(tasks), num_tokens, dtype=torch.long)
    kinds = torch.full((len(tasks), num_tokens), -1)
    for row, task in enumerate(tasks):
        example = draw_example(rng, task, num_tokens)
        ids[row] = torch.tensor(example.document)
        kinds[row, len(example.prompt) :] = torch.tensor([KIND_NUMBERS[kind] for kind in example.kinds])
    return ids, kinds


def kind_weights() -> torch.Tensor:
    """Return the loss weight of each kind, by number."""
    return torch.tensor([HEAVY_WEIGHT if kind in HEAVY_KINDS else 1.0 for kind in TokenKind])
