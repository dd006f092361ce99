"""Checks that systems draw the model's greedy tokens; nothing is timed before they pass.

Two checks on the same prompts. In fp32 every system must give exactly the tokens of transformers' `generate`.
In the timed dtype, rounding decides between near-tied logits, and one such token changes all that follow; so
each token is judged after its own prefix: the fp32 model's logits are computed over prompt and output, and
the token's logit may be at most MARGIN_STDS below the best one, or as far as those that `generate` itself
draws in that dtype (models of random weights may round more).

A system with a rounded KV cache is compared with the reference back-end in fp32 from the same format. Two
correct kernels do not draw equal tokens there: sums in another order move a number across a code's boundary
occasionally. So only gaps are judged: in fp32 within MARGIN_STDS; in the timed dtype, which crosses far more
boundaries, at most as much further off as the format itself is from the model.

Packed weights (a .gguf file) are multiplied with rounded activations, by system-specific rules. There the
judge multiplies in fp32, and a system has to draw its first choice after the same prefix in LEAST_TOP1 of the
positions: rounding costs a few, another model is at chance level, one in the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from kvreclaim.bench.common import Columns, Row, sheet
from kvreclaim.bench.systems.base import CHUNK, SystemSetup
from kvreclaim.bench.systems.hf import Generate
from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import KVReclaimError
from kvreclaim.sampling_params import SamplingParams

MARGIN_STDS = 0.15
"""Allowed gap to the best logit, in standard deviations of a row of logits (the best lies about 4 above the
mean); bf16 rounding was seen to reach 0.06 in every system."""
LEAST_TOP1 = 0.5


class WrongTokensError(KVReclaimError, RuntimeError):
    """A system draws other tokens than the model."""


@dataclass(frozen=True, slots=True)
class TokenAgreement:
    """Comparison of one system's tokens with the fp32 model's.

    exact:       share of tokens before the first that differs from the fp32 output
    top1:        share of tokens that are the fp32 model's first choice after the same prefix
    largest_gap: to the best logit, in standard deviations of the logits; allowed: at most
    must_equal:  whether tokens in fp32 must be equal
    least_top1:  for packed weights, which are judged by top1
    """

    system: str
    dtype: str
    num_tokens: int
    exact: float
    top1: float
    largest_gap: float
    allowed: float = MARGIN_STDS
    must_equal: bool = True
    least_top1: float | None = None

    @property
    def passed(self) -> bool:
        """Equal in fp32; within the margin in any dtype."""
        if self.least_top1 is not None:
            return self.top1 >= self.least_top1
        equal = self.exact == 1.0 or self.dtype != "float32" or not self.must_equal
        return self.largest_gap <= self.allowed and equal

    def row(self) -> Row:
        return asdict(self) | {"passed": self.passed}


class Judge(ABC):
    """Computes the greedy tokens and the logits after a given prefix, in fp32."""

    @abstractmethod
    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The greedy continuation; end tokens are ordinary ones."""

    @abstractmethod
    def gaps(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Best logit less the drawn token's at each place, over the row's standard deviation: [tokens]."""

    def judge(
        self, system: str, dtype: str, prompts: list[list[int]], outputs: list[list[int]]
    ) -> TokenAgreement:
        """Compare one system's outputs of the prompts, all of the same length."""
        gaps = torch.cat([self.gaps(p, out) for p, out in zip(prompts, outputs, strict=True)])
        exact = [_common(out, self.greedy(p, len(out))) for p, out in zip(prompts, outputs, strict=True)]
        return TokenAgreement(
            system=system,
            dtype=dtype,
            num_tokens=gaps.numel(),
            exact=sum(exact) / gaps.numel(),
            top1=float((gaps <= 0).float().mean()),
            largest_gap=float(gaps.max()),
        )


class Referee(Judge):
    """The model in fp32 under transformers' own attention."""

    def __init__(self, model: Path) -> None:
        self.path = model
        self.system = self._load("float32")
        self.model = self.system.model
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        key = (max_tokens, *prompt)
        if key not in self._greedy:
            (self._greedy[key],) = self.system.generate([prompt], max_tokens)
        return list(self._greedy[key])

    def judge(
        self, system: str, dtype: str, prompts: list[list[int]], outputs: list[list[int]]
    ) -> TokenAgreement:
        judged = super().judge(system, dtype, prompts, outputs)
        if dtype == "float32" or judged.largest_gap <= MARGIN_STDS:
            return judged
        drawn = self._load(dtype).generate(prompts, len(outputs[0]))
        largest = max(float(self.gaps(p, out).max()) for p, out in zip(prompts, drawn, strict=True))
        return replace(judged, allowed=max(MARGIN_STDS, largest))

    def _load(self, dtype: str) -> Generate:
        return Generate(SystemSetup(self.path, dtype, torch.get_num_threads()))

    @torch.inference_mode()
    def gaps(self, prompt: list[int], tokens: list[int]) -> Tensor:
        ids = torch.tensor([prompt + tokens[:-1]], device=self.model.device)
        logits = self.model(ids, logits_to_keep=len(tokens)).logits[0]
        return _gaps(logits.cpu(), tokens)


class PackedReferee(Judge):
    """A model under the reference back-end in fp32, packed weights multiplied in fp32, in one KV format,
    prompts in one chunk."""

    def __init__(self, path: Path, kv_cache_dtype: str = "auto") -> None:
        self.llm = LLM(
            path,
            dtype="float32",
            device="cpu",
            kernels="reference",
            kv_cache_dtype=kv_cache_dtype,
            quantized_activations="exact" if path.suffix == ".gguf" else "auto",
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK,
            num_blocks=CHUNK // 16,
            enable_prefix_caching=False,
        )

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return self.llm.generate(prompt, params)[0].outputs[0].token_ids

    def gaps(self, prompt: list[int], tokens: list[int]) -> Tensor:
        rows: list[Tensor] = []
        self.llm.score([prompt], [tokens], observers=[lambda _, row: rows.append(row.clone())])
        return _gaps(torch.cat(rows), tokens)

    def judge(
        self, system: str, dtype: str, prompts: list[list[int]], outputs: list[list[int]]
    ) -> TokenAgreement:
        return replace(super().judge(system, dtype, prompts, outputs), least_top1=LEAST_TOP1)


class FormatReferee(PackedReferee):
    """One KV format of a model without packed weights. model: measures the format's own error"""

    def __init__(self, path: Path, kv_cache_dtype: str, model: Referee) -> None:
        super().__init__(path, kv_cache_dtype)
        self.model = model

    def judge(
        self, system: str, dtype: str, prompts: list[list[int]], outputs: list[list[int]]
    ) -> TokenAgreement:
        judged = Judge.judge(self, system, dtype, prompts, outputs)
        allowed = MARGIN_STDS
        if dtype != "float32":
            pairs = zip(prompts, outputs, strict=True)
            allowed += max(float(self.model.gaps(p, self.greedy(p, len(out))).max()) for p, out in pairs)
        return replace(judged, allowed=allowed, must_equal=False)


def _gaps(logits: Tensor, tokens: list[int]) -> Tensor:
    """[tokens] from logits [tokens, V], or log-probabilities, which differ by a constant per row."""
    drawn = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return (logits.amax(-1) - drawn) / logits.std(-1)


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def require_agreement(results: list[TokenAgreement]) -> None:
    """Raises: WrongTokensError naming the systems that failed."""
    if wrong := [result for result in results if not result.passed]:
        raise WrongTokensError(
            f"greedy tokens are not the model's ({'; '.join(map(_line, wrong))}; a cache that does not round "
            "has to give 100% in float32); nothing was timed; fix the system, or leave it out."
        )


def _line(x: TokenAgreement) -> str:
    if x.least_top1 is not None:
        return f"{x.system}: {x.top1:.0%} the model's first choice, of at least {x.least_top1:.0%}"
    return (
        f"{x.system} in {x.dtype}: {x.exact:.0%} as in fp32, gap up to {x.largest_gap:.3f} of "
        f"{x.allowed:.3f} allowed"
    )


def agreement_table(rows: list[Row]) -> Table:
    columns: Columns = {
        "system": "{system}",
        "dtype": "{dtype}",
        "tokens": "{num_tokens}",
        "exact": "{exact:.0%}",
        "top-1": "{top1:.0%}",
        "largest gap (σ)": "{largest_gap:.4f}",
        "allowed": lambda row: "-" if row["least_top1"] else f"{row['allowed']:.2f}",
    }
    return sheet("greedy tokens", columns, rows, text_columns=2)
