"""An engine extension that counts the tokens a request computes, without changes to the package.

python examples/count_tokens.py
"""

from __future__ import annotations

from kvreclaim import LLM, SamplingParams, demo_model
from kvreclaim.engine.extension import Extension
from kvreclaim.engine.request.request import Scheduled


class TokenCounter(Extension):
    """Counts the tokens that the model has computed, prompts and answers."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def attended(self, step: list[Scheduled]) -> None:
        """A forward pass is over."""
        self.num_tokens += sum(item.num_tokens for item in step)


def main() -> None:
    llm = LLM(demo_model(), num_blocks=64)
    counter = llm.engine.extensions.add(TokenCounter())
    llm.generate([[1, 2, 3, 4, 5]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    print(f"{counter.num_tokens} tokens computed")  # the last one that is drawn is not computed


if __name__ == "__main__":
    main()
