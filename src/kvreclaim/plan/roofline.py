"""The time of a step from a card's data sheet: bytes over a share of the bandwidth, products over a share of
the FLOP/s. Without calibration that is wrong by tens of percent, and the answer has a note of it."""

from __future__ import annotations

from typing import Any

from kvreclaim.kv_bytes import KVBytes
from kvreclaim.plan.cards import Card
from kvreclaim.plan.cost import Linear, WithExperts
from kvreclaim.plan.shapes import ModelShape
from kvreclaim.plan.weights import WeightFormat, state_bytes, weight_bytes

BANDWIDTH_SHARE = 0.8
"""Share of a data sheet's bandwidth that weights and keys are read with."""
FLOPS_SHARE = 0.6
BASE_S = 0.5e-3
LINK_LATENCY_S = 10e-6
"""Latency of one all-reduce; an assumption."""
DATA_SHEET = "data sheet"
ERROR = "uncalibrated: off by 20 to 40 %"


def roofline(
    shape: ModelShape,
    card: Card,
    weights: WeightFormat,
    form: KVBytes,
    *,
    num_cards: int = 1,
    bandwidth_share: float = BANDWIDTH_SHARE,
    flops_share: float = FLOPS_SHARE,
    block_size: int = 16,
    read_share: float = 1.0,
) -> Linear:
    """max(weights / bandwidth, 2 P T / flops) + keys / bandwidth + attention's products / flops, in bf16. A
    sequence's state is read and written in every step.

    num_cards:  tensor parallel; keys and values of a latent lie on each of them whole
    read_share: of a sequence's keys that a step reads, less than 1 where layers have windows
    """
    sizes = weight_bytes(shape, weights)
    bandwidth = card.bandwidth * bandwidth_share * num_cards
    flops = card.bf16_flops * flops_share * num_cards
    latent = all(layer.latent for layer in shape.attention)
    state = state_bytes(shape)
    slot = shape.block_bytes(form, block_size) / block_size
    hops = 2 * shape.num_layers if num_cards > 1 else 0
    exchanged = 2 * (num_cards - 1) / num_cards * 2 * shape.hidden_size
    dense, flop = sizes.dense / bandwidth, 2 * shape.active_linear / flops
    common: dict[str, Any] = {
        "base": BASE_S + hops * LINK_LATENCY_S + dense,
        "token": hops * exchanged / card.link,
        "kv": slot * read_share / (bandwidth / num_cards if latent else bandwidth),
        "pair": shape.pair_flops / flops,
        "seq": 2 * state / bandwidth,
        "move": block_size * slot / card.pcie,
        "facts": _facts(shape, card, weights, form, num_cards, bandwidth_share, flops_share),
    }
    experts = [layer.experts for layer in shape.layers if layer.experts]
    if not experts:
        return Linear(**common, beyond=flop, knee=dense / flop)
    missed = 1 - experts[0].per_token / experts[0].count
    return WithExperts(**common, dense=dense, experts=sizes.routed / bandwidth, missed=missed, flop=flop)


def _facts(
    shape: ModelShape,
    card: Card,
    weights: WeightFormat,
    form: KVBytes,
    num_cards: int,
    bandwidth_share: float,
    flops_share: float,
) -> dict[str, Any]:
    return {
        "kind": DATA_SHEET,
        "error": ERROR,
        "model": shape.name,
        "weights": weights.name,
        "kv_cache_dtype": form.name,
        "card": card.name,
        "num_cards": num_cards,
        "bandwidth_share": bandwidth_share,
        "flops_share": flops_share,
    }
