"""How well a saved demo model does on seeds that training never drew."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvreclaim.eval.chain import (
    ChainExample,
    ChainTask,
    Kind,
    accuracy,
    carry_accuracy,
    exact_match,
    lookup_accuracy,
    progress,
)


def predict(network: torch.nn.Module, example: ChainExample) -> list[int]:
    """Return the teacher-forced argmax for each token of the trace, with full attention."""
    logits = network(torch.tensor([example.document]), use_cache=False).logits
    return logits[0, len(example.prompt) - 1 : -1].argmax(-1).tolist()


def generate(network: torch.nn.Module, examples: list[ChainExample]) -> list[list[int]]:
    """Return greedy continuations of prompts of one length, up to a few tokens past the longest trace."""
    prompts = torch.tensor([example.prompt for example in examples])
    limit = max(len(example.trace) for example in examples) + 8
    mask = torch.ones_like(prompts)
    output = network.generate(prompts, attention_mask=mask, max_new_tokens=limit, do_sample=False)
    return output[:, prompts.shape[1] :].tolist()


@torch.inference_mode()
def check(folder: Path, num_examples: int, task: ChainTask | None = None) -> dict[str, float]:
    """Load the model of `folder` and return its mean scores, teacher-forced and free-running."""
    task = task or ChainTask()
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    examples = [task.sample(seed) for seed in range(num_examples)]
    forced = [(example, predict(network, example)) for example in examples]
    free = list(zip(examples, generate(network, examples), strict=True))
    scores = {
        "num_examples": num_examples,
        "mean_tokens": sum(len(example.document) for example in examples) / num_examples,
        "lookup_accuracy": sum(lookup_accuracy(*pair) for pair in forced) / num_examples,
        "carry_accuracy": sum(carry_accuracy(*pair) for pair in forced) / num_examples,
        "token_accuracy": sum(accuracy(*pair, kinds=tuple(Kind)) for pair in forced) / num_examples,
        "progress": sum(progress(*pair) for pair in free) / num_examples,
        "exact_match": sum(exact_match(*pair) for pair in free) / num_examples,
    }
    return {name: round(score, 4) for name, score in scores.items()}
