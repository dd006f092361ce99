"""How well a saved demo model does on seeds that training never drew."""

from pathlib import Path
from statistics import mean

import torch
from transformers import AutoModelForCausalLM

from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.eval.example import Example, TokenKind, accuracy, exact_match, progress

GENERATED_AT_ONCE = 16


def predict(network: torch.nn.Module, example: Example) -> list[int]:
    """Return the teacher-forced argmax for each token of the trace, with full attention."""
    hidden = network.model(torch.tensor([example.document]), use_cache=False).last_hidden_state
    logits = network.lm_head(hidden[0, len(example.prompt) - 1 : -1])
    return logits.argmax(-1).tolist()


def generate(network: torch.nn.Module, examples: list[Example]) -> list[list[int]]:
    """Return greedy continuations, as long as the longest trace; shorter prompts are padded on the left."""
    longest = max(len(example.prompt) for example in examples)
    limit = max(len(example.trace) for example in examples)
    pad = network.config.pad_token_id
    prompts = torch.tensor([[pad] * (longest - len(e.prompt)) + list(e.prompt) for e in examples])
    output = network.generate(
        prompts, attention_mask=(prompts != pad).long(), max_new_tokens=limit, do_sample=False
    )
    return output[:, longest:].tolist()


@torch.inference_mode()
def check(
    folder: Path, task: str, num_tokens: int, num_examples: int, num_free: int, first_seed: int = 0
) -> dict[str, float]:
    """Return the mean scores of the model in `folder` on one task; the first `num_free` also run freely."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sampler = DEMO_TASKS[task].make(num_tokens)
    examples = [sampler.sample(first_seed + i) for i in range(num_examples)]
    forced = [predict(network, example) for example in examples]
    free = []
    for begin in range(0, num_free, GENERATED_AT_ONCE):
        free += generate(network, examples[begin : min(begin + GENERATED_AT_ONCE, num_free)])
    kinds = sorted({kind for example in examples for kind in example.kinds}, key=list(TokenKind).index)
    scores = {
        "num_examples": num_examples,
        "mean_tokens": mean(len(example.document) for example in examples),
        "accuracy": mean(map(accuracy, examples, forced, [DEMO_TASKS[task].judged] * num_examples)),
    }
    if num_free:
        scores["num_free"] = num_free
        scores["progress"] = mean(map(progress, examples, free))
        scores["exact_match"] = mean(map(exact_match, examples, free))
    for kind in kinds:
        scores[kind.value] = mean(map(accuracy, examples, forced, [(kind,)] * num_examples))
    return {name: round(score, 4) for name, score in scores.items()}
