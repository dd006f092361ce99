"""Check whether a model's rows can be computed independently of each other (ops.native.decoder.exact_rows).

torch's products choose their order of sums by the number of rows. Its activations (SiLU, GELU, the sigmoid)
give elements at the end of a thread's share other last bits than its vector loop does. So every product, norm
and activation has to be native. Gathers, and sums and products of single elements, are the same in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.native_modules import NativeLinear, NativeModel, NativeNorm
from kvreclaim.model.quantized.layers import PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_batch_invariant(model: PreTrainedModel, name: str, attention: str, modules: str) -> None:
    """Raise InvalidArgumentError unless attention and all of the model run on kernels with independent rows.

    attention: the back-end; modules: what runs on which kernels, for the message
    """
    if attention == "native" and has_independent_rows(model):
        return
    raise InvalidArgumentError(
        f"batch_invariant is True, but a part of {name} runs on kernels whose rows depend on the batch "
        f"(attention: {attention}; {modules}); run a model with Llama's layers in float32 or bfloat16 on a "
        "CPU with kernels 'auto', or leave batch_invariant out.",
        field="batch_invariant",
    )


def has_independent_rows(model: PreTrainedModel) -> bool:
    """Return whether all that mixes the numbers of a row is native: layers, norms and the head."""
    body = model.base_model
    norm = getattr(body, "norm", None)
    return (
        isinstance(vars(body).get("forward"), NativeModel)  # its layers are native, too
        and isinstance(vars(norm).get("forward"), NativeNorm)
        and isinstance(model.get_output_embeddings(), (NativeLinear, PackedLinear))
        and getattr(model.config, "final_logit_softcapping", None) is None
    )
