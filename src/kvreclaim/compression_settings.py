"""Settings of compression that need no torch; each is checked once, then frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvreclaim.checks import require
from kvreclaim.options import FIRST, MAX_COUNT, check_options, option, settings_of

AUTO = "auto"
FULL = "full"
"""The policy that keeps everything."""
DEFAULT_BUDGET = 2048
CONTENTS = ("prose", "lookups")
"""Contents of the documents that calibration measures losses on."""
MEASURED = ("interval", "recent", "protect_prompt", "mode", "verify")
"""Fields of CompressionSettings that have their defaults where losses are measured."""
BUDGETS = tuple(32 * each for each in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512))
"""Steps of budget "auto"."""


def parse_budget(given: object) -> int | float:
    """A budget as an int, tokens, or as a float, a share up to 1. Texts are numbers, or per cent with %.

    Raises: InvalidArgumentError.
    """
    try:
        if isinstance(given, str):
            text = given.strip()
            number = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
            is_share = text.endswith("%") or not text.lstrip("+-").isdecimal()
        else:
            number = float("nan") if isinstance(given, bool) else float(given)  # type: ignore[arg-type]
            is_share = isinstance(given, float)
    except (TypeError, ValueError, OverflowError):
        number, is_share = float("nan"), False
    if is_share and 0 < number <= 1:
        return number
    require(
        not (number > 1 and str(given).rstrip().endswith("%")),
        f"budget is {given!r}, and the full cache in the model's dtype is 100%; give a share up to 100%, as "
        "in '20%', or a number of tokens, as in 2048.",
        "budget",
    )
    require(
        1 <= number <= MAX_COUNT and number.is_integer(),
        f"budget is {given!r}; it must be at least 1 token, at most {MAX_COUNT}, as in 2048, or a share of "
        "the prompt's bytes in the model's dtype above 0, up to 1, as in 0.2 or '20%'.",
        "budget",
    )
    return int(number)


@dataclass(frozen=True)
class CompressionSettings:
    """The part of CompressionConfig that needs no torch.

    It checks numbers; CompressionConfig checks the rest. Without a budget it is DEFAULT_BUDGET, with max_loss
    everything until the prompt is known. Raises: InvalidArgumentError.
    """

    policy: Any = option(
        AUTO,
        "Compression policy (`kvreclaim policies`), or auto, the best one in calibration. Default: no "
        "compression; auto if another compression option is given.",
        flags=("--kv-compression",),
        typed_as=str,
        panel=FIRST,
    )
    budget: int = option(
        None,
        "Tokens to keep per layer and KV head, or a share of the prompt's bytes: 0.2 or 20%. With --verify "
        f"also auto, as few as drafting allows. Default: {DEFAULT_BUDGET}.",
        low=1,
        high=MAX_COUNT,
        unit=" tokens",
        flags=("--kv-budget",),
        typed_as=str,
        also=(AUTO,),
        panel=FIRST,
    )
    interval: int = option(
        128,
        "Compress again when a sequence is this many tokens over the budget.",
        low=1,
        high=MAX_COUNT,
        unit=" token",
        flags=("--kv-compression-interval",),
    )
    sinks: int = option(
        4,
        "First tokens that are never evicted.",
        low=0,
        high=MAX_COUNT,
        unit=" tokens",
        flags=("--kv-sinks",),
    )
    recent: int = option(
        128,
        "Last tokens that are never evicted.",
        low=0,
        high=MAX_COUNT,
        unit=" tokens",
        flags=("--kv-recent",),
    )
    protect_prompt: bool = option(
        False,
        "Evict prompt tokens only if the budget cannot be met otherwise.",
        flags=("--kv-protect-prompt",),
    )
    protect_system: bool = option(
        True,
        "Never evict a chat's system prompt and tools, up to half of the budget.",
        flags=("--kv-protect-system",),
        kw_only=True,
    )
    mode: str | None = option(
        None,
        "Which heads keep the same tokens: union (all), per_head or per_layer_head. Default: the policy's "
        "own.",
        flags=("--kv-compression-mode",),
    )
    verify: bool = option(
        False,
        "Draft from the compressed cache and verify with the full one. The output is that of the full cache.",
        flags=("--verify",),
        kw_only=True,
    )
    verify_tokens: int = option(
        16,
        "Maximum number of draft tokens between two verifications.",
        low=1,
        high=64,
        unit=" token",
        flags=("--verify-tokens",),
        kw_only=True,
    )
    stats: object = option(
        None,
        "File of query statistics. Default: the one beside the weights, else the one in the cache directory.",
        flags=("--kv-compression-stats",),
        typed_as=str,
    )
    max_loss: float | None = option(
        None,
        "Instead of a budget: largest share of answers to lose, such as 0.01. The budget is the smallest one "
        "at which 95 % of documents like those of `kvreclaim calibrate --curve` lose no more.",
        low=0.0,
        high=1.0,
        flags=("--kv-max-loss",),
        kw_only=True,
        panel=FIRST,
    )
    content: str | None = option(
        None,
        "What --kv-max-loss is about: prose, or lookups of facts. Default: whichever needs more tokens.",
        choices=CONTENTS,
        flags=("--kv-content",),
        kw_only=True,
    )
    auto_budget: bool | None = field(default=None, kw_only=True)
    """Whether budget was "auto"; set by it."""
    budget_share: float | None = field(default=None, kw_only=True)
    """The budget as a share of the prompt's bytes; set by it. Until a prompt is known, the budget is then
    MAX_COUNT."""

    @property
    def in_words(self) -> str:
        """Policy and budget for people."""
        if self.policy == FULL:
            return "none, every token is kept (policy full)"
        if self.verify:
            return f"{self.policy} drafts from {self.budget_in_words}, the full cache verifies"
        return f"{self.policy}, {self.budget_in_words}"

    @property
    def is_of_prompt(self) -> bool:
        """Whether the budget is known only with the prompt's length."""
        return self.max_loss is not None or self.budget_share is not None

    @property
    def budget_in_words(self) -> str:
        """The budget, or what chooses it, for people."""
        if self.max_loss is not None:
            return f"as many tokens as max_loss {self.max_loss:g} needs"
        if self.budget_share is not None:
            return f"{100 * self.budget_share:.4g}% of the prompt's bytes in the model's dtype"
        return f"{self.budget:,} tokens per KV head"

    def __post_init__(self) -> None:
        self._read_budget()
        check_options(self)
        require(
            self.policy != FULL or self.budget_share is None,
            f"policy 'full' keeps every token, and budget {self.budget_share} is a share of their bytes; "
            "leave the budget out and name a KV cache dtype, or name a policy that evicts.",
            "budget",
        )
        self._check_max_loss()
        always = self.sinks + self.recent
        if self.budget == AUTO:
            object.__setattr__(self, "auto_budget", True)
            object.__setattr__(self, "budget", next((b for b in BUDGETS if b >= always + 16), MAX_COUNT))
        require(
            self.verify or not self.auto_budget,
            "budget is 'auto', but verify is False; a budget may be tried out only where the full cache "
            "verifies; set verify=True, or pass a number of tokens.",
            "budget",
        )
        require(
            self.budget > always,
            f"budget is {self.budget} tokens, but sinks + recent = {always} are always kept; raise the "
            "budget, or lower sinks or recent.",
        )

    def _read_budget(self) -> None:
        """A share becomes budget_share; any other budget takes its place."""
        given = self.budget if self.budget in (None, AUTO) else parse_budget(self.budget)
        if isinstance(given, float):
            object.__setattr__(self, "budget_share", given)
            given = MAX_COUNT
        elif given != MAX_COUNT:
            object.__setattr__(self, "budget_share", None)
        if given is None:
            given = DEFAULT_BUDGET if self.max_loss is None else MAX_COUNT
        object.__setattr__(self, "budget", given)

    def _check_max_loss(self) -> None:
        if self.max_loss is None:
            require(
                self.content is None,
                f"content is {self.content!r}, but max_loss is None: content says what max_loss is about; "
                "give both, or leave content out.",
                "content",
            )
            return
        require(
            self.budget == MAX_COUNT and self.budget_share is None,
            f"budget is {self.budget_share or self.budget!r} and max_loss {self.max_loss}, which chooses a "
            "budget; leave one out.",
            "max_loss",
        )
        for name in MEASURED:
            value, default = getattr(self, name), settings_of(CompressionSettings)[name].default
            require(
                value == default,
                f"{name} is {value!r}, but losses are measured with {default!r}; leave {name}, or max_loss, "
                "out.",
                name,
            )
