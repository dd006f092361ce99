"""Every family, however it is batched, chunked, preempted or cached, answers as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from checking import first_tokens as tokens

from kvreclaim import LLM, SamplingParams
from kvreclaim.errors import UnsupportedModelError

PROMPTS = tiny.prompts((5, 33, 17, 1, 64), seed=3)
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
EVERY_FAMILY = pytest.mark.parametrize("family", tiny.FAMILIES + tiny.SCALED)
Expected = Callable[[str], list[list[int]]]


@pytest.fixture(scope="module")
def expected(tiny_dir: Callable[[str], Path]) -> Expected:
    """family -> the tokens that generate() gives for PROMPTS."""
    return tiny.remembered(tiny_dir, PROMPTS, MAX_TOKENS)


def load(directory: Path, **limits: int | bool) -> LLM:
    return LLM(directory, dtype="float32", device=tiny.DEVICE, **limits)


def few(family: str, num_blocks: int, grouped: int, tables: int) -> int:
    """Blocks that do not suffice for all prompts at once; where windows have tables of their own a block is
    that of one table. grouped: with two; tables: of gemma3 with six."""
    between = (grouped + tables) // 2
    own = {"gemma3": tables, "gemma2": grouped, "gpt-oss": grouped, "ministral": between}
    own["llama4"] = 60 if num_blocks == 9 else between
    own["mistral"] = 6 if num_blocks == 9 else 8  # what has left its windows is given back
    return own.get(family, num_blocks)


def check_pool(llm: LLM) -> None:
    """Nothing is held when nothing runs, and the books are in order."""
    llm.engine.memory.check()
    assert llm.engine.memory.pool.num_in_use == 0


@EVERY_FAMILY
def test_a_batch_of_uneven_prompts_equals_generate(family, tiny_dir, expected: Expected) -> None:
    llm = load(tiny_dir(family))
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected(family)
    check_pool(llm)


@EVERY_FAMILY
def test_chunks_of_seven_tokens_change_nothing(family, tiny_dir, expected: Expected) -> None:
    llm = load(tiny_dir(family), max_num_batched_tokens=7, block_size=4)
    most_tokens: list[int] = []
    outputs = llm.generate(PROMPTS, GREEDY, on_step=lambda step: most_tokens.append(step.num_tokens))
    assert tokens(outputs) == expected(family)
    assert max(most_tokens) == 7
    check_pool(llm)


@EVERY_FAMILY
def test_preemption_changes_nothing(family, tiny_dir, expected: Expected) -> None:
    small = {"block_size": 4, "max_num_batched_tokens": 16} if family == "llama4" else {}
    llm = load(tiny_dir(family), num_blocks=few(family, 9, 14, 42), enable_prefix_caching=False, **small)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == expected(family)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    check_pool(llm)


@EVERY_FAMILY
def test_preemption_with_cached_prefixes_changes_nothing(family, tiny_dir, expected: Expected) -> None:
    llm = load(tiny_dir(family), num_blocks=few(family, 25, 33, 75), block_size=4, max_num_batched_tokens=20)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert tokens(outputs) == expected(family)
        assert sum(output.metrics.preemptions for output in outputs) > 0
    check_pool(llm)


@EVERY_FAMILY
def test_a_cached_prefix_changes_nothing(family, tiny_dir, expected: Expected) -> None:
    llm = load(tiny_dir(family), block_size=8)
    first = llm.generate(PROMPTS, GREEDY)
    again = llm.generate(PROMPTS, GREEDY)
    longer = [p + answer[:12] for p, answer in zip(PROMPTS, expected(family), strict=True)]
    rest = llm.generate(longer, SamplingParams(temperature=0, max_tokens=MAX_TOKENS - 12, ignore_eos=True))
    assert tokens(first) == tokens(again) == expected(family)
    assert tokens(rest) == [answer[12:] for answer in expected(family)]
    assert [output.metrics.num_cached_tokens for output in first] == [0] * len(PROMPTS)
    for outputs, prompts in ((again, PROMPTS), (rest, longer)):
        hits = [output.metrics.num_cached_tokens for output in outputs]
        assert hits == [(len(prompt) - 1) // 8 * 8 for prompt in prompts]
    check_pool(llm)


@EVERY_FAMILY
def test_order_and_company_change_nothing(family, tiny_dir, expected: Expected) -> None:
    order = [3, 1, 4, 0, 2]
    llm = load(tiny_dir(family), max_num_seqs=2, enable_prefix_caching=False)
    shuffled = tokens(llm.generate([PROMPTS[i] for i in order], GREEDY))
    assert shuffled == [expected(family)[i] for i in order]
    alone = tokens(llm.generate(PROMPTS[1], GREEDY))
    assert alone == [expected(family)[1]]


@EVERY_FAMILY
def test_scores_equal_a_forward_pass(family, tiny_dir) -> None:
    """Every place of a random continuation, not only the likeliest token."""
    given = tiny.prompts((9, 30, 1, 18, 40), seed=4)
    scores = load(tiny_dir(family)).score(PROMPTS, given)
    oracle = tiny.load_oracle(tiny_dir(family))
    for prompt, continuation, score in zip(PROMPTS, given, scores, strict=True):
        places = torch.tensor(continuation)[:, None]
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + continuation])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, places)[:, 0]
        torch.testing.assert_close(torch.tensor(score.logprobs), logprobs, atol=1e-4, rtol=0)
        assert score.predicted == logits.argmax(-1).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "deepseek-v3"])
def test_bf16_scores_are_near_fp32(family, tiny_dir) -> None:
    """No further from fp32 than transformers' own bf16 (twice its largest error, for rounding's luck)."""
    directory, prompt, given = tiny_dir(family), PROMPTS[4], tiny.prompts((60,), seed=5)[0]
    ids, places = torch.tensor([prompt + given]), torch.tensor(given)[:, None]

    def oracle(dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode():
            logits = tiny.load_oracle(directory).to(dtype)(ids).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1).gather(-1, places)[:, 0]

    exact, rounded = oracle(torch.float32), oracle(torch.bfloat16)
    score = LLM(directory, dtype="bfloat16", device="cpu").score([prompt], [given])[0]
    error = (torch.tensor(score.logprobs) - exact).abs()
    assert 0 < error.max() < 2 * (rounded - exact).abs().max()
    assert error.mean() < 2 * (rounded - exact).abs().mean()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("stablelm", "StableLmAttention does not hand keyword arguments down to its attention function"),
        ("falcon", "its own attention code instead of transformers' AttentionInterface"),
        ("mamba", "no attention layer"),
        ("t5", "encoder-decoder"),
    ],
)
def test_a_model_that_cannot_be_paged_is_refused_by_name(family, reason, tiny_dir) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        load(tiny_dir(family))
    assert isinstance(refusal.value, ValueError)
