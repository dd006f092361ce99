"""Write a checkpoint as transformers' save_pretrained does, holding one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
MOST_BYTES = "50GB"
"""Largest size of a file; transformers' own default."""
AT_ONCE = 2**22
"""Numbers that are rounded and written at a time."""


class TensorFile:
    """A safetensors file of tensors that are known by shape and dtype before the first is written.

    The library writes a file from tensors that are all in memory. Layout: the length of the header; the
    header, JSON filled up with spaces to 8 bytes; the tensors, those with the widest numbers first, then by
    name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        places, at = {}, 0
        for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
            tensor, places[name] = tensors[name], at
            at += tensor.nbytes
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [places[name], at],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._places = {name: 8 + len(text) + place for name, place in places.items()}
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Round to bf16, which transformers reads a GGUF file into, and write in the dtype of the model's."""
        self._file.seek(self._places[name])
        for part in tensor.reshape(-1).split(AT_ONCE):
            rounded = part.bfloat16().to(self._dtypes[name])
            self._file.write(rounded.view(torch.uint8).numpy())


def write_checkpoint(
    model: PreTrainedModel, own: Mapping[str, Tensor], read: Callable[[str], Tensor], directory: Path
) -> None:
    """Write the weights of a model without memory, and an index where they take several files.

    own:  its tensors by name, on no device
    read: one of them
    """
    from transformers.core_model_loading import revert_weight_conversion  # models, which few commands need

    stored = revert_weight_conversion(model, dict(own))
    shards = split_torch_state_dict_into_shards(
        stored, filename_pattern=SAFE_WEIGHTS_NAME.replace(".", "{suffix}."), max_shard_size=MOST_BYTES
    )
    with ExitStack() as opened:
        files = {
            name: opened.enter_context(TensorFile(directory / name, {n: stored[n] for n in names}))
            for name, names in shards.filename_to_tensors.items()
        }
        for name in own:
            made = revert_weight_conversion(model, {name: read(name)})
            while made:  # nothing of it is held when the next one is read
                part, tensor = made.popitem()
                files[shards.tensor_to_filename[part]].write(part, tensor)
                del tensor
    if shards.is_sharded:
        total = {"total_parameters": model.num_parameters(), **shards.metadata}
        index = {"metadata": total, "weight_map": shards.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
