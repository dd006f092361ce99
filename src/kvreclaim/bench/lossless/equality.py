"""The demo model's documents, answered with the full cache and in verify mode: every token must be equal.

Also measures tokens per verification, next to a simulation of rounds: the policy alone is given the full
cache's answer (teacher forcing), and drafts are taken as accepted where it predicts the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from rich.table import Table

from kvreclaim import demo_model
from kvreclaim.bench.common import Row, sheet
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.features.verification import companion_drafts as drafting
from kvreclaim.engine.request.outputs import RequestOutput
from kvreclaim.engine.request.spec import footprint_of
from kvreclaim.errors import KVReclaimError
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.schedule import EvictionCounters, Footprint

Document = tuple[list[int], int]
"""A prompt, and the number of tokens of its answer."""
BUDGETS = (64, 128, 256, 512)
DRAFTS = 16
SEQUENCES = 32
"""Documents at once: without drafts, a step computes as many rows as each would alone."""
TEMPERATURES = (0.0, 0.8)
POLICY = "query_mixture"


class OtherTokensError(KVReclaimError, RuntimeError):
    """Verify mode has drawn other tokens than the full cache."""


def run(documents: Sequence[Document], dtypes: Sequence[str] = ("float32", "bfloat16")) -> list[Row]:
    """Compare, for every dtype, budget and way of sampling.

    Returns: a row for each with documents, tokens, equal (documents), accepted, per_verification, simulated.
    Raises: OtherTokensError if an answer differs.
    """
    rows = []
    for dtype in dtypes:
        limits: dict[str, Any] = {
            "num_blocks": 8192,
            "max_num_seqs": SEQUENCES,
            "enable_prefix_caching": False,
        }
        full = LLM(demo_model(), dtype=dtype, **limits)
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(temperature=temperature, seed=n, max_tokens=length, ignore_eos=True)
                for n, (_, length) in enumerate(documents)
            ]
            prompts = [prompt for prompt, _ in documents]
            known = full.generate(prompts, params)
            for budget in BUDGETS:
                rows.append(_compare(full, prompts, params, known, budget))
                rows[-1] |= {"dtype": dtype, "temperature": temperature}
    return rows


def _compare(
    full: LLM,
    prompts: list[list[int]],
    params: list[SamplingParams],
    known: list[RequestOutput],
    budget: int,
) -> Row:
    config = CompressionConfig(
        POLICY, budget=budget, interval=64, recent=16, verify=True, verify_tokens=DRAFTS
    )
    llm = full.sibling()
    found = llm.generate(prompts, params, config)
    wrong = [n for n, (a, b) in enumerate(zip(known, found, strict=True)) if _tokens(a) != _tokens(b)]
    if wrong:
        raise OtherTokensError(
            f"document {wrong[0]} of {len(prompts)} (budget {budget}, {len(wrong)} in all): verify mode "
            "draws other tokens than the full cache."
        )
    totals = llm.engine.totals.speculation
    row: Row = {
        "budget": budget,
        "documents": len(prompts),
        "tokens": sum(len(_tokens(each)) for each in known),
        "equal": len(prompts) - len(wrong),
        "accepted": totals.num_accepted_tokens / max(1, totals.num_draft_tokens),
        "per_verification": 1 + totals.num_accepted_tokens / max(1, totals.num_drafts),
    }
    if params[0].temperature == 0:
        row |= _with_simulation(full, prompts, params, known, config)
    return row


def _tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def _with_simulation(
    full: LLM,
    prompts: list[list[int]],
    params: list[SamplingParams],
    known: list[RequestOutput],
    config: CompressionConfig,
) -> Row:
    """Tokens per verification with drafts up to the limit: measured, and simulated."""
    llm = full.sibling()
    with patch.object(drafting, "LEAST_CONFIDENCE", 0.0):
        llm.generate(prompts, params, config)
    totals = llm.engine.totals.speculation
    alone = CompressionConfig(POLICY, budget=config.budget, interval=config.interval, recent=config.recent)
    scores = llm.score(prompts, [_tokens(each) for each in known], alone)
    num_rounds = num_tokens = 0
    for prompt, score, answer in zip(prompts, scores, known, strict=True):
        footprint = footprint_of(llm.compressor(alone), llm.engine.config, prompt)
        agrees = [a == b for a, b in zip(score.predicted, _tokens(answer), strict=True)]
        rounds, tokens = simulate(agrees, footprint, len(prompt), config.verify_tokens)
        num_rounds, num_tokens = num_rounds + rounds, num_tokens + tokens
    return {
        "to_the_limit": 1 + totals.num_accepted_tokens / max(1, totals.num_drafts),
        "simulated": num_tokens / max(1, num_rounds),
    }


def simulate(agrees: Sequence[bool], footprint: Footprint, num_prompt: int, drafts: int) -> tuple[int, int]:
    """Simulate rounds with drafts over an answer, and count rounds and tokens: a draft is accepted if the
    compressed cache, given all tokens before, predicts the answer's next token. agrees: of the answer's
    tokens, the first of which is drawn from the prompt itself."""
    account, place, num_rounds, num_tokens = EvictionCounters(), 1, 0, 0
    while place < len(agrees):
        computed = num_prompt + place - 1
        if footprint.is_due(computed, num_prompt, account):
            account.num_evicted = computed - footprint.budget
            account.last_computed = computed
        until = footprint.tokens_until_pass(computed, num_prompt, account)
        most = min(drafts, until - 1, len(agrees) - place - 1)
        accepted = next((n for n in range(max(most, 0)) if not agrees[place + n]), max(most, 0))
        if most > 0:
            num_rounds += 1
            num_tokens += accepted + 1
        place += accepted + 1
    return num_rounds, num_tokens


def equality_table(rows: Sequence[Row]) -> Table:
    columns = {
        "dtype": "{dtype}",
        "temperature": "{temperature}",
        "budget": "{budget}",
        "documents": "{documents}",
        "equal": "{equal}",
        "tokens": "{tokens:,}",
        "drafts accepted": "{accepted:.3f}",
        "tokens / verification": "{per_verification:.2f}",
        "to the limit": "{to_the_limit:.2f}",
        "simulated": "{simulated:.2f}",
    }
    title = f"verify mode and the full cache, demo model, {POLICY}, {DRAFTS} drafts at most"
    return sheet(title, columns, rows, text_columns=2)
