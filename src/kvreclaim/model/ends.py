"""The tokens that end an answer: all that a model's files name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.dense import DenseConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Ids = int | Iterable[int] | None
WELL_KNOWN = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>"),
        *("<|return|>", "<|call|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>"),
    }
)
"""Texts of tokens that end an answer whether or not a GGUF header says so, as in llama.cpp."""
ANSWER = "kvreclaim"
logger = logging.getLogger(__name__)


def gguf_ends(fields: Mapping[str, Any], tokenizer: Tokenizer | None, config: Any) -> frozenset[int]:
    """End tokens of a GGUF file with these fields."""
    declared = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return _ends(config, tokenizer, *declared, _well_known(tokenizer))


def directory_ends(name: str, tokenizer: Tokenizer | None, config: Any) -> frozenset[int]:
    """End tokens of a directory or a hub id. Raises: InvalidArgumentError."""
    return _ends(config, tokenizer, _generation_ends(name))


def _ends(config: Any, tokenizer: Tokenizer | None, *declared: Ids) -> frozenset[int]:
    """Return the given end tokens, and those of tokenizer, chat template and config.

    A config's default from its class counts only if there is no other value: the 2 of LlamaConfig is
    "#" in Llama 3.
    """
    if tokenizer is not None:
        declared = (*declared, tokenizer.eos_token_id, _template_end(tokenizer))
    parts = [config, config.get_text_config()]
    ids = [(getattr(part, "eos_token_id", None), _default_end(part)) for part in parts]
    found = _all(*declared, *(own for own, filled in ids if own != filled)) or _all(*(own for own, _ in ids))
    num_tokens = config.get_text_config().vocab_size
    return frozenset(i for i in found if 0 <= i < num_tokens)  # no other can be drawn, or forbidden


def _default_end(config: Any) -> Ids:
    """Return the end token of the config's class."""
    if isinstance(config, DenseConfig):
        return config.default_eos
    return getattr(type(config), "eos_token_id", None)


def _all(*declared: Ids) -> set[int]:
    return {i for ids in declared for i in ([ids] if isinstance(ids, int) else ids or ())}


def _template_end(tokenizer: Tokenizer) -> int | None:
    """Return the special token that the chat template writes right behind an assistant's message."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception as error:  # templates are foreign code, and may need other messages than these
        logger.warning(
            "no end of a turn is read from the chat template, which takes no plain answer: %s", error
        )
        return None
    _, answer, behind = text.rpartition(ANSWER)
    special = _special_tokens(tokenizer) if answer else {}
    first = max((text for text in special if behind.startswith(text)), key=len, default="")
    return special.get(first)


def _special_tokens(tokenizer: Tokenizer | None) -> dict[str, int]:
    """Ids of special tokens by text."""
    added = {} if tokenizer is None else tokenizer.added_tokens_decoder
    return {str(token): i for i, token in added.items() if token.special}


def _well_known(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return special tokens with a text that marks the end of an answer."""
    texts = _special_tokens(tokenizer)
    known = WELL_KNOWN - {"<|end|>"} if "<|return|>" in texts else WELL_KNOWN  # there messages end with it
    return frozenset(texts[text] for text in known & texts.keys())


def _generation_ends(name: str) -> Ids:
    """End tokens in generation_config.json of a directory or a hub id. Raises: InvalidArgumentError."""
    file = cached_file(name, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    try:
        found: Ids = json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(
            f"{GENERATION_CONFIG_NAME} of model {name!r} cannot be read ({error}); repair or remove it."
        ) from error
    return found
