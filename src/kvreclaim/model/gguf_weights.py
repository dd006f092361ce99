"""The weights of a GGUF file by transformers' names, decoded one at a time."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvreclaim.model.gguf_index import GgufIndex, GgufTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AT_ONCE = 2**22
"""Numbers that gguf decodes at a time."""


class GgufWeights:
    """A file's tensors as transformers reads them.

    own:     the tensors of the model by name, without memory, each once
    missing: names of those that the file lacks
    """

    def __init__(self, index: GgufIndex, model: PreTrainedModel) -> None:
        """Raises: NotImplementedError for a model whose names in GGUF files transformers does not know."""
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self._index = index
        processor = TENSOR_PROCESSORS.get(index.fields["general.architecture"], TensorProcessor)
        self._processor = processor(config=model.config.to_dict())
        self._names: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)
        self._sources: dict[str, list[GgufTensor]] = defaultdict(list)
        for name, tensor in index.tensors.items():
            known = self._names.get(name) or self._names.get(name.removesuffix(".weight"))
            if known is not None:
                self._sources[known].append(tensor)
        first: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():  # where one is tied, both names have it
            first.setdefault(id(tensor), (name, tensor))
        self.own = {name: tensor.detach() for name, tensor in first.values()}
        self.missing = self.own.keys() - self._sources.keys()

    def read(self, name: str) -> Tensor:
        """One tensor in fp32, which nobody else holds.

        Raises: ValueError where it is of another shape than the model's; what gguf raises for unknown types.
        """
        held: dict[str, Tensor] = {}
        for source in self._sources[name]:
            self._decode(source, name, held)
        if held[name].shape != self.own[name].shape:
            raise ValueError(f"{name} is {list(held[name].shape)}, not {list(self.own[name].shape)}")
        return held[name]

    def _decode(self, source: GgufTensor, name: str, held: dict[str, Tensor]) -> None:
        """Put a tensor, or the part of it that a source has, into held."""
        made = self._processor.process(
            weights=_dequantized(self._index, source),
            name=source.name,
            tensor_key_mapping=self._names,
            parsed_parameters={"tensors": held},
        )
        if made.name is not None:  # else it is there already: experts, whose parts are put together
            held[name] = torch.from_numpy(np.ascontiguousarray(made.weights))
        self._index.forget(source)


def _dequantized(index: GgufIndex, source: GgufTensor) -> np.ndarray:
    """In fp32. A piece at a time, since gguf holds what it is given twice."""
    from gguf import GGMLQuantizationType, dequantize

    rows = index.rows(source).reshape(max(1, prod(source.shape[:-1])), -1)
    numbers = np.empty((len(rows), source.shape[-1]), np.float32)
    step = max(1, AT_ONCE // source.shape[-1])
    for first in range(0, len(rows), step):
        numbers[first : first + step] = dequantize(
            rows[first : first + step], GGMLQuantizationType[source.kind]
        )
    return numbers.reshape(source.shape)
