"""Grammars of structured outputs, by llguidance: which tokens may come next.

llguidance is taken before xgrammar: it compiles nothing that grows with the schema, copies its states (for
n > 1), bounds the work of a schema that explodes, and refuses by name what it does not support; xgrammar
leaves that out (docs/log.md).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import llguidance
import numpy as np
import torch
from llguidance import TokenizerWrapper
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvreclaim.engine.features.structured_outputs.conflicts import Barred, may_end
from kvreclaim.engine.sampling.refusal import conflict
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.parsers.endless import has_text, has_value
from kvreclaim.parsers.lark import WHITE_SPACE
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.structured_outputs import AnswerGrammar, StructuredOutputsParams

KEPT = 128
"""Grammars that are kept, the latest ones."""
NAMES = {
    "answer": "grammar of the answer",
    "json": "JSON schema",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "grammar",
}
Matcher = llguidance.LLMatcher


class OutputGrammar:
    """The grammar of one output, and how far the output follows it; an OutputRule.

    If the last token was drawn under a mask, another thread makes the next mask while the engine computes.
    """

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._mask: Future[bytes] | None = None
        self._used_mask = False

    @property
    def matcher(self) -> Matcher:
        """The state after the last token, once no other thread uses it."""
        if self._mask is not None:
            self._mask.result()
        return self._matcher

    @property
    def may_end(self) -> bool:
        return self.matcher.is_accepting()

    def fork(self) -> OutputGrammar:
        """Return a copy for another output."""
        return OutputGrammar(self.matcher.deep_copy())

    def allows(self, token: int) -> bool:
        return self.matcher.validate_tokens([token]) == 1

    def take(self, token: int) -> bool:
        matcher, used_mask = self.matcher, self._used_mask
        self._mask, self._used_mask = None, False
        if not matcher.consume_token(token):
            raise _broken(matcher)
        is_complete = matcher.is_stopped()
        if used_mask and not is_complete:
            self._start_mask()
        return is_complete

    @staticmethod
    def restrict(logits: Tensor, places: list[int], rules: Sequence[OutputGrammar]) -> None:
        masks = [rule._start_mask() for rule in rules]
        for rule in rules:
            rule._used_mask = True
            if rule.matcher.is_error():
                raise _broken(rule.matcher)
        allowed = np.stack([np.frombuffer(mask.result(), dtype=np.uint8) for mask in masks])
        bits = np.unpackbits(~allowed, axis=-1, count=logits.shape[-1], bitorder="little")
        barred = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
        if len(places) == len(logits):
            logits.masked_fill_(barred, float("-inf"))
            return
        for place, row in zip(places, barred, strict=True):
            logits[place].masked_fill_(row, float("-inf"))  # in place: [N, V] is much to copy

    def _start_mask(self) -> Future[bytes]:
        """Make the next mask in another thread, unless it is being made: a bit for each allowed token."""
        if self._mask is None:
            self._mask = _threads().submit(self._matcher.compute_bitmask)
        return self._mask


class Grammars:
    """Grammars for one model's tokens, each made once; threads may share them."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        try:
            self._tokens = from_tokenizer(tokenizer, vocab_size, sorted(eos_token_ids))
        except ValueError as error:
            raise InvalidArgumentError(
                f"structured_outputs cannot be followed with this model's tokenizer: {error}; leave them "
                "out.",
                field="structured_outputs",
            ) from error
        self._kept: OrderedDict[tuple[str, str], OutputGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, params: StructuredOutputsParams) -> OutputGrammar:
        """Begin an output. Raises: InvalidArgumentError for a bad grammar."""
        key = params.source
        first = self._kept.get(key) or OutputGrammar(self._made(*key))
        with self._lock:
            self._kept[key] = first
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return first.fork()

    def check(
        self, begun: OutputGrammar, params: SamplingParams, bad_words: Collection[tuple[int, ...]]
    ) -> None:
        """Raises: InvalidArgumentError for options with which no output follows the grammar to its end."""
        barred = Barred.of(params, bad_words)
        if barred is None or params.structured_outputs is None:
            return
        is_json = params.structured_outputs.source[0] in ("json", "answer")
        if not may_end(begun.matcher, barred, self._tokens, is_json=is_json):
            raise conflict(params, is_early=bool(barred.early))

    def _made(self, kind: str, text: str) -> Matcher:
        try:
            matcher = Matcher(self._tokens, _grammar(kind, text), log_level=0)
        except (ValueError, RecursionError) as error:
            raise _refusal(kind, str(error)) from error
        reason = matcher.get_error() if matcher.is_error() else _reason_at_start(matcher)
        if reason is not None:
            raise _refusal(kind, reason)
        return matcher


def can_read(tokenizer: Any) -> bool:
    """Return whether outputs of such a tokenizer can follow grammars. Only its decoder is checked, because
    reading the vocabulary takes seconds."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    few = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    if backend.decoder is not None:
        few.decoder = backend.decoder
    try:
        from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=few), 2, [0])
    except ValueError:
        return False
    return True


def check(params: StructuredOutputsParams) -> None:
    """Raises: InvalidArgumentError for a bad grammar, whatever the model."""
    if (reason := reason_against(params)) is not None:
        raise _refusal(params.source[0], reason)


def reason_against(params: StructuredOutputsParams) -> str | None:
    """Return the reason why a grammar without special tokens cannot be followed; None if it can."""
    try:
        grammar = _grammar(*params.source)
        is_wrong, reasons = Matcher.validate_grammar_with_warnings(grammar)
    except (ValueError, RecursionError) as error:
        is_wrong, reasons = True, [str(error)]
    if is_wrong:
        return _shortened(reasons[0])
    matcher = Matcher(_byte_tokens(), grammar, log_level=0)
    return None if matcher.is_error() else _reason_at_start(matcher)


def composed(lark: str, answer: StructuredOutputsParams | None) -> AnswerGrammar:
    """Return a grammar in Lark with another grammar inserted as @answer."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    if answer is not None:
        text = _grammar(*answer.source)
        inner = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
        grammars += [{**inner[0], "name": "answer"}, *inner[1:]]
    return AnswerGrammar(grammar=json.dumps({"grammars": grammars}, separators=(",", ":")))


def _grammar(kind: str, text: str) -> str:
    """Convert a grammar to llguidance's own form. Raises: ValueError."""
    if kind == "answer":
        return text
    if kind == "json":
        if not has_value(json.loads(text)):  # json.loads raises for invalid JSON
            raise ValueError("no JSON value follows it, for each would contain another one")
        return Matcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITE_SPACE})
    grammar = llguidance.grammar_from(kind, text)  # type: ignore[arg-type]
    if kind == "grammar" and not has_text(grammar):
        raise ValueError("no text follows it, for `start` never ends")
    return grammar


def _reason_at_start(matcher: Matcher) -> str | None:
    """Return the reason why no output can begin; None if one can."""
    begun = matcher.deep_copy()
    begun.compute_bitmask()
    return "no text follows it" if begun.is_error() else None


class _Bytes:
    """A vocabulary of single bytes, for grammars of an unknown model."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _byte_tokens() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257)


def _refusal(kind: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the {NAMES.get(kind, kind)} cannot be followed: {_shortened(reason)}; change it.",
        field="structured_outputs",
    )


def _broken(matcher: Matcher) -> InvalidArgumentError:
    """Return why an output cannot follow its grammar any further, without its text and the grammar, which
    llguidance shows as well."""
    reason = matcher.get_error().partition("\n")[0]
    if matcher.stop_reason() == "NoExtensionBias" or reason == "NoExtensionBias":
        reason = "no token may come next"
    return InvalidArgumentError(
        f"the grammar of the answer cannot be followed to its end: {reason}; change the schema or grammar.",
        field="structured_outputs",
    )


def _shortened(reason: str) -> str:
    return " ".join(reason.split())[:300].rstrip(".")


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads that make masks; llguidance releases the GIL."""
    return ThreadPoolExecutor(thread_name_prefix="mask")
