"""Turn a GGUF file (llama.cpp's format) into a directory as transformers writes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreclaim.errors import FetchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvreclaim.model.loader import Tokenizer

NEEDED = ("gguf", "accelerate")
DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of tokenizer.ggml.pre for which llama.cpp cuts every digit off before GPT-2's pattern is applied."""

LIKE_GPT2 = frozenset({"default", "gpt-2"})


def check_packages() -> None:
    """Raises: FetchError where what reads GGUF files is not installed."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise FetchError(
            f"reading GGUF files needs {' and '.join(missing)}, which this environment lacks; "
            "run pip install 'kvreclaim[gguf]'."
        )


def convert_gguf(file: Path, directory: Path, say: Callable[[str], object]) -> None:
    """Write config, tokenizer, chat template and weights, dequantised to bf16, into an empty directory.

    say: told where the tokenizer may cut text otherwise than the model has learned

    Raises: FetchError where the file is no GGUF that transformers reads; OSError or SafetensorError where
        the directory cannot be written.
    """
    check_packages()
    try:
        tokenizer, model = _read(file, say)
    except Exception as error:  # foreign files, parsed by foreign code, which raises whatever comes of it
        reason = (str(error).strip() or "no reason given").split("\n", 1)[0]
        raise FetchError(
            f"{file.name} cannot be read as GGUF ({type(error).__name__}: {reason}); it is damaged or of an "
            "architecture that transformers does not read from GGUF: pass another file or a hub id."
        ) from error
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _read(file: Path, say: Callable[[str], object]) -> tuple[Tokenizer, PreTrainedModel]:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    field = GGUFReader(file).get_field("tokenizer.ggml.pre")
    where: Any = {"pretrained_model_name_or_path": os.fspath(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    _cut_as_trained(tokenizer, field.contents() if field else "default", say)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    return tokenizer, model


def _cut_as_trained(tokenizer: Tokenizer, rule: str, say: Callable[[str], object]) -> None:
    """Cut digits off where the vocabulary wants it, which transformers 5.23 does not: it cuts "\\n\\n1" as
    "\\n", "\\n", "1", where the model has learned "\\n\\n", "1"."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend = tokenizer.backend_tokenizer
    if rule in DIGITS_APART:
        backend.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    elif rule not in LIKE_GPT2 and isinstance(backend.pre_tokenizer, ByteLevel):
        say(f"text is cut as GPT-2 does, since transformers does not know {rule!r}, which the file asks for")
