"""Training batches of the chain task, with its dials drawn at random."""

import random

import torch

from kvreclaim.eval.chain import HEADER_TOKENS, HOP_TOKENS, NUM_NODES, ChainExample, ChainTask, Kind, Stream

FILLER_WORDS = (1, 10)
TOKENS_PER_FILLER_WORD = 64  # short examples get little filler, so that most hops need a look-up (see below)
MAX_DECOYS = 20
TRACE_SHARE = (0.35, 0.65)
HEAVY_KINDS = (Kind.LOOKUP, Kind.CARRY, Kind.RETURN, Kind.RESTORE)
HEAVY_WEIGHT = 3.0
KIND_NUMBERS = {kind: i for i, kind in enumerate(Kind)}


def draw_example(rng: random.Random, num_tokens: int) -> ChainExample:
    """Return an example of exactly `num_tokens` tokens with random share of trace, filler and decoys."""
    least, most = FILLER_WORDS
    num_filler = rng.randint(least, min(most, num_tokens // TOKENS_PER_FILLER_WORD))
    pair = 2 * (HOP_TOKENS + num_filler)
    num_facts = max(1, min(int(num_tokens * rng.uniform(*TRACE_SHARE)) // pair, NUM_NODES - MAX_DECOYS))
    num_prompt_tokens = num_tokens - num_facts * pair - 1
    free_tokens = num_prompt_tokens - HEADER_TOKENS - 3 * num_facts
    # Few facts teach tricks instead of look-ups: the one after START, the one before END, one not used up.
    num_decoys = rng.randint(0, min(MAX_DECOYS, free_tokens // 3))
    task = ChainTask(
        num_prompt_tokens=num_prompt_tokens,
        num_trace_tokens=num_facts * pair + 1,
        filler_words=(num_filler, num_filler),
        num_decoys=num_decoys,
    )
    return task.sample(rng.getrandbits(48), Stream.TRAINING)


def draw_batch(rng: random.Random, num_rows: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [N, T] and the kind of each token [N, T]: its number, or -1 in the prompt."""
    ids = torch.zeros(num_rows, num_tokens, dtype=torch.long)
    kinds = torch.full((num_rows, num_tokens), -1)
    for row in range(num_rows):
        example = draw_example(rng, num_tokens)
        ids[row] = torch.tensor(example.document)
        kinds[row, len(example.prompt) :] = torch.tensor([KIND_NUMBERS[kind] for kind in example.kinds])
    return ids, kinds


def kind_weights() -> torch.Tensor:
    """Return the loss weight of each kind, by number."""
    return torch.tensor([HEAVY_WEIGHT if kind in HEAVY_KINDS else 1.0 for kind in Kind])
