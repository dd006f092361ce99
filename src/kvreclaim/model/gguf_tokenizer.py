"""What a GGUF file says of its tokenizer and transformers does not read from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of tokenizer.ggml.pre for which llama.cpp cuts every digit off before GPT-2's pattern is applied."""
LIKE_GPT2 = frozenset({"default", "gpt-2"})
BEGUN = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        *("jina-v5-nano", "tekken", "chameleon"),
    }
)
"""Values of tokenizer.ggml.pre for which llama.cpp begins texts with BOS where the file does not say."""
SPACE, SENTENCEPIECE_BOS = "\u2581", 1
TEMPLATE, NAMED = "tokenizer.chat_template", "tokenizer.chat_template."


def as_in_llama_cpp(tokenizer: Tokenizer, fields: Mapping[str, Any], say: Callable[[str], object]) -> None:
    """Make the tokenizer that transformers reads from a file what these fields of its header say.

    say: called with one line where the file's rule for cutting text is not known
    """
    _cut_as_trained(tokenizer, fields.get("tokenizer.ggml.pre", "default"), say)
    _begin_texts(tokenizer, fields)
    if fields.get("tokenizer.ggml.add_space_prefix") is False:
        _add_no_space(tokenizer)
    names = [key.removeprefix(NAMED) for key in fields if key.startswith(NAMED)]
    if names:
        default = {"default": fields[TEMPLATE]} if TEMPLATE in fields else {}
        tokenizer.chat_template = default | {name: fields[f"{NAMED}{name}"] for name in names}


def _cut_as_trained(tokenizer: Tokenizer, rule: str, say: Callable[[str], object]) -> None:
    """Cut digits off where the vocabulary was trained so, which transformers 5.23 does not: it cuts "\\n\\n1"
    as "\\n", "\\n", "1", where the model has learned "\\n\\n", "1"."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend = tokenizer.backend_tokenizer
    if rule in DIGITS_APART:
        backend.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    elif rule not in LIKE_GPT2 and isinstance(backend.pre_tokenizer, ByteLevel):
        say(f"text is cut as GPT-2 does, since transformers does not know {rule!r}, which the file names")


def _begin_texts(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    """Begin texts with BOS where llama.cpp does by default."""
    model, rule = (fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if tokenizer.bos_token is None and model == "llama":
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(SENTENCEPIECE_BOS)
    begins = model == "llama" or (model == "gpt2" and rule in BEGUN)
    if fields.get("tokenizer.ggml.add_bos_token", begins) and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True


def _add_no_space(tokenizer: Tokenizer) -> None:
    """Read the first word of a text as it is, without a space before it."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)
    elif "Prepend" in str(backend.normalizer):
        backend.normalizer = normalizers.Replace(" ", SPACE)
    else:
        return
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    tokenizer.init_kwargs["add_prefix_space"] = False  # what is saved says so, too
