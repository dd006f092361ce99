"""Turn a GGUF file (llama.cpp's format) into a directory as transformers writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreclaim.errors import FetchError, reason_of
from kvreclaim.model.checkpoint_file import write_checkpoint
from kvreclaim.model.ends import gguf_ends
from kvreclaim.model.gguf_index import GgufIndex
from kvreclaim.model.gguf_tokenizer import as_in_llama_cpp
from kvreclaim.model.gguf_weights import GgufWeights
from kvreclaim.model.quantized.gguf_fields import scaled_rotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

NEEDED = ("gguf",)


def check_packages() -> None:
    """Raises: FetchError where what reads GGUF files is not installed."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise FetchError(
            f"reading GGUF files needs {' and '.join(missing)}, which this environment lacks; "
            "run pip install 'kvreclaim[gguf]'."
        )


def convert_gguf(file: Path, directory: Path, say: Callable[[str], object]) -> None:
    """Write config, tokenizer, chat template and weights, dequantised to bf16, into an empty directory; one
    tensor at a time is in memory.

    say: told where the tokenizer may cut text otherwise than the model has learned

    Raises: FetchError where the file is no GGUF that transformers reads, or reads whole; OSError where the
        directory cannot be written.
    """
    check_packages()
    with _reading(file.name):
        index, tokenizer, model = _opened(file)
        weights = GgufWeights(index, model)
    header = header_of(index)
    _check_whole(file.name, header, model, weights.missing)
    as_in_llama_cpp(tokenizer, index.fields, say)
    model.config.save_pretrained(directory)
    _write_ends(gguf_ends(index.fields, tokenizer, model.config), model.config, directory)
    write_checkpoint(model, weights.own, _reading(file.name)(weights.read), directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Raises: FetchError for whatever is raised by foreign code that parses foreign files."""
    try:
        yield
    except Exception as error:
        raise FetchError(
            f"{name} cannot be read as GGUF ({reason_of(error)}); it is damaged or of an architecture that "
            "transformers does not read from GGUF: pass another file or a hub id."
        ) from error


def _write_ends(ends: frozenset[int], config: Any, directory: Path) -> None:
    """Write the generation config, with one id or a list."""
    from transformers import GenerationConfig

    settings, ids = GenerationConfig.from_model_config(config), sorted(ends)
    settings.update(eos_token_id=ids[0] if len(ids) == 1 else ids or None)
    settings.save_pretrained(directory)


@dataclass(frozen=True)
class GgufHeader:
    """Facts of a GGUF file that transformers does not report.

    num_weights: numbers in all tensors but those of the rotation
    rotation:    a tensor that scales rotary positions; None where there is none
    """

    num_weights: int
    rotation: str | None


def _opened(file: Path) -> tuple[GgufIndex, Tokenizer, PreTrainedModel]:
    """The index, and what transformers makes of the header; the model is in bf16 and has no memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    index = GgufIndex(file)
    index.num_layers()
    where: Any = {"pretrained_model_name_or_path": os.fspath(file.parent), "gguf_file": file.name}
    config, tokenizer = AutoConfig.from_pretrained(**where), AutoTokenizer.from_pretrained(**where)
    config.update(scaled_rotation(index, config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.update({"architectures": [type(model).__name__]})
    return index, tokenizer, model


def header_of(index: GgufIndex) -> GgufHeader:
    """The header in an index."""
    turning = [name for name in index.tensors if name.startswith("rope_")]
    return GgufHeader(
        num_weights=sum(prod(t.shape) for t in index.tensors.values() if t.name not in turning),
        rotation=turning[0] if turning else None,
    )


def _check_whole(name: str, header: GgufHeader, model: PreTrainedModel, missing: Set[str]) -> None:
    """Refuse what transformers would fill with random numbers or leave out, since the model would be another.

    Raises: FetchError.
    """
    remedy = "pass the model's hub id, or another file."
    if missing:
        raise FetchError(f"{name} lacks {len(missing)} tensors ({min(missing)} is one); {remedy}")
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != header.num_weights:
        raise FetchError(
            f"{name} holds {header.num_weights} weights, of which transformers makes {found}: it does not "
            f"read the rest from GGUF; {remedy}"
        )
    refuse_rotation(name, header, model.config)


def refuse_rotation(name: str, header: GgufHeader, config: Any) -> None:
    """Raises: FetchError where a file scales its rotary positions by a tensor, and not as LongRoPE does."""
    rotation: Any = config.get_text_config().rope_parameters or {}
    if header.rotation is not None and rotation.get("rope_type") != "longrope":
        raise FetchError(
            f"{name} scales its rotary positions ({header.rotation}), which transformers does not read from "
            "GGUF; pass the model's hub id, or another file."
        )
