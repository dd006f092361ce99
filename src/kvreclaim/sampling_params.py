"""Sampling options of one request: vLLM's SamplingParams."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvreclaim.checks import check_int, check_number, require
from kvreclaim.options import FIRST, MAX_COUNT, check_options, option
from kvreclaim.structured_outputs import StructuredOutputsParams

MIN_SEED, MAX_SEED = -(1 << 63), (1 << 64) - 1
ANY_SEED = -1
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, with vLLM's names, meanings and order. Raises: InvalidArgumentError.

    n:           number of outputs; the prompt is computed once, and they share its blocks
    stop:        strings that end an output; the text ends before them
    stop_token_ids: tokens that end an output; they stay in token_ids
    logprobs:    per generated token, log-probabilities of this many most likely tokens and of the sampled
                 one; -1: of the whole vocabulary. They are taken before bias, penalties and temperature
    prompt_logprobs: the same per prompt token except the first. The prompt is computed without a prefix hit,
                 and the logits of a chunk, [max_num_batched_tokens, V], are in memory at once
    detokenize:  False: outputs have no text
    skip_special_tokens: special tokens add no text
    include_stop_str_in_output: the text ends with the stop string or token that ended the output
    logit_bias:  token id -> -100 .. 100, added to the logits before penalties
    allowed_token_ids: only these tokens are sampled
    bad_words:   texts that no output contains: a token that would complete one is not sampled. Each is
                 tokenised twice, at the start of a text and after a space
    structured_outputs: what every output must look like; it ends when nothing more may come
    thinking_token_budget: tokens of reasoning after which what ends it is forced; the model's chat template
                 must show how it writes its reasoning
    """

    n: int = option(1, low=1)
    presence_penalty: float = option(
        0.0, "Subtract this from the logits of tokens that the output contains.", low=-2.0, high=2.0
    )
    frequency_penalty: float = option(
        0.0,
        "Subtract this from a token's logit for each time that the output contains it.",
        low=-2.0,
        high=2.0,
    )
    repetition_penalty: float = option(
        1.0,
        "Penalize tokens that the prompt or the output contains; above 1 makes them less likely.",
        low=0.01,
        high=100.0,
    )
    temperature: float = option(
        1.0,
        "Randomness of sampling; 0 always takes the most likely token.",
        low=0.0,
        high=100.0,
        panel=FIRST,
    )
    top_p: float = option(
        1.0,
        "Sample from the fewest most likely tokens whose probabilities add up to this; 0: the likeliest.",
        low=0.0,
        high=1.0,
        panel=FIRST,
    )
    top_k: int = option(
        0,
        "Sample from this many most likely tokens; 0 or -1 means all.",
        low=-1,
        high=MAX_COUNT,
        panel=FIRST,
    )
    min_p: float = option(
        0.0,
        "Drop tokens less probable than this share of the most likely token's probability.",
        low=0.0,
        high=1.0,
    )
    seed: int | None = option(
        None,
        "Seed of this request; the same seed gives the same output. -1: any.",
        low=MIN_SEED,
        high=MAX_SEED,
        panel=FIRST,
    )
    stop: str | list[str] | tuple[str, ...] | None = option(
        None,
        "Text that ends the output; the output ends before it. May be given several times.",
        typed_as=list[str],
    )
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = option(False, "Go on after the model's end-of-sequence token.")
    max_tokens: int | None = option(
        16,
        "Maximum number of tokens to generate; null: as many as fit.",
        low=1,
        high=MAX_COUNT,
        flags=("--max-tokens", "-n"),
        panel=FIRST,
    )
    min_tokens: int = option(
        0, "Generate at least this many tokens before the output may end.", low=0, high=MAX_COUNT
    )
    logprobs: int | None = option(None, low=-1)
    prompt_logprobs: int | None = option(None, low=-1)
    detokenize: bool = option(True, kw_only=True)
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.", kw_only=True)
    include_stop_str_in_output: bool = option(
        False, "End the text with the stop string or token that ended the output.", kw_only=True
    )
    logit_bias: dict[int, float] | None = field(default=None, kw_only=True)
    allowed_token_ids: list[int] | tuple[int, ...] | None = field(default=None, kw_only=True)
    bad_words: list[str] | tuple[str, ...] | None = option(
        None,
        "Text that the output may not contain. May be given several times.",
        typed_as=list[str],
        kw_only=True,
    )
    structured_outputs: StructuredOutputsParams | None = field(default=None, kw_only=True)
    thinking_token_budget: int | None = option(
        None, "End the model's reasoning after this many tokens.", low=0, high=MAX_COUNT, kw_only=True
    )
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self)
        if self.seed == ANY_SEED:
            object.__setattr__(self, "seed", None)
        require(
            not (self.temperature == 0 and self.n > 1),
            f"n is {self.n} with temperature 0; greedy outputs are all the same; pass n=1 or a temperature.",
            "n",
        )
        self._check_bias()
        self._check_ends()
        given = self.structured_outputs
        require(
            given is None or isinstance(given, StructuredOutputsParams),
            f"structured_outputs is a {type(given).__name__}; pass StructuredOutputsParams(...), or None.",
            "structured_outputs",
        )
        for name in ("stop_token_ids", "allowed_token_ids"):
            _check_token_ids(name, getattr(self, name))
        require(
            self.allowed_token_ids is None or bool(self.allowed_token_ids),
            "allowed_token_ids is empty, so no token can be sampled; pass some, or None.",
            "allowed_token_ids",
        )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for name, texts in (("stop", stop), ("bad_words", self.bad_words or [])):
            require(
                isinstance(texts, (list, tuple)) and all(isinstance(s, str) and s for s in texts),
                f"{name} is {getattr(self, name)!r}; pass non-empty strings in a list"
                f"{', or one string' if name == 'stop' else ''}.",
                name,
            )
        require(
            self.detokenize or not stop,
            f"stop is {self.stop!r} with detokenize False: stop strings are looked for in text; leave one of "
            "them out, or pass stop_token_ids.",
            "stop",
        )
        object.__setattr__(self, "stop_strings", tuple(stop))

    def _check_bias(self) -> None:
        bias = self.logit_bias
        require(
            bias is None or isinstance(bias, dict),
            f"logit_bias is a {type(bias).__name__}; pass a dict of token id to bias, or None.",
            "logit_bias",
        )
        for token, value in (bias or {}).items():
            check_int("a token id of logit_bias", token, 0, field="logit_bias")
            check_number(f"logit_bias of token {token}", value, -MAX_BIAS, MAX_BIAS, field="logit_bias")

    def _check_ends(self) -> None:
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it.",
            "min_tokens",
        )


def _check_token_ids(name: str, ids: object) -> None:
    require(
        ids is None or isinstance(ids, (list, tuple)),
        f"{name} is {ids!r}; pass a list of token ids or None.",
        name,
    )
    for token in ids or ():  # type: ignore[attr-defined]
        check_int(name, token, 0)
