"""Weights of hidden states: found again where they are known, published ones read, others refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from compression_oracles import model_facts, noise, query_stats
from safetensors.torch import save_file
from torch import nn

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.kvzap import UNITS, KVzapFit, token_scores
from kvreclaim.compression.public_kvzap import read_kvzap
from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError
from kvreclaim.testing.toys import HIDDEN_SIZE

FACTS = model_facts()


class Published(nn.Module):
    """A module with the parts of NVIDIA's KVzapModel under their names."""

    def __init__(self, inputs: int, units: int | None, outputs: int, layers: int) -> None:
        super().__init__()
        self.module_list = nn.ModuleList(
            nn.Linear(inputs, outputs)
            if units is None
            else nn.Sequential(nn.Linear(inputs, units), nn.GELU(), nn.Linear(units, outputs))
            for _ in range(layers)
        )


def write(directory, units: int | None, *, inputs: int = HIDDEN_SIZE, outputs: int = 2, layers: int = 3):
    torch.manual_seed(0)
    model = Published(inputs, units, outputs, layers).bfloat16()
    save_file(model.state_dict(), directory / "model.safetensors")
    sizes = {"input_dim": inputs, "hidden_dim": units, "output_dim": outputs, "n_modules": layers}
    (directory / "config.json").write_text(json.dumps({"model_type": "kvzap", **sizes}))
    return model.float()


@pytest.mark.parametrize("units", [None, 5])
def test_published_weights_give_the_published_scores(units, tmp_path):
    """Through our file, from a directory or a file."""
    model = write(tmp_path, units)
    for path in (tmp_path, str(tmp_path / "model.safetensors")):
        query_stats(FACTS).with_kvzap(read_kvzap(path, FACTS)).save(tmp_path / "stats.safetensors")
        stats = QueryStats.load(tmp_path / "stats.safetensors")
        assert (stats.metadata.kvzap_inputs, stats.metadata.kvzap_units) == (HIDDEN_SIZE, units or 0)
        for layer, module in enumerate(model.module_list):
            hidden = noise(layer, 7, HIDDEN_SIZE)
            with torch.no_grad():
                torch.testing.assert_close(token_scores(hidden, stats.layer(layer)), module(hidden))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 4}, "layers 4, the model has 3"),
        ({"outputs": 4}, "KV heads 4, the model has 2"),
        ({"inputs": 8}, "hidden size 8, the model has 6"),
    ],
)
def test_weights_of_another_model_are_refused(change, message, tmp_path):
    write(tmp_path, 5, **change)
    with pytest.raises(StatsMismatchError, match=message):
        read_kvzap(tmp_path, FACTS)


def test_what_is_no_such_file(tmp_path):
    with pytest.raises(StatsMismatchError, match="no KVzap weights that can be read"):
        read_kvzap(tmp_path / "absent", FACTS)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"nonsense")
    with pytest.raises(StatsMismatchError, match="no KVzap weights that can be read"):
        read_kvzap(tmp_path, FACTS)
    whole = write(tmp_path, 5).state_dict()
    plain = write(tmp_path, None).state_dict()
    rest = {name: tensor for name, tensor in whole.items() if name != "module_list.1.2.bias"}
    broken = {
        "is no weight or bias": {**plain, "extra": torch.zeros(1)},
        "needs a weight and a bias": rest,
        "every layer": {name: x for name, x in plain.items() if "list.1" not in name},
        "of one linear map, or": whole | plain,
        "different shapes": plain | {"module_list.1.weight": torch.zeros(3, 6)},
        "do not follow each other": {
            name: torch.zeros(2, 9) if name.endswith("2.weight") else x for name, x in whole.items()
        },
    }
    for message, tensors in broken.items():
        save_file(tensors, file)
        with pytest.raises(StatsMismatchError, match=message):
            read_kvzap(tmp_path, FACTS)


def documents(seed: int, score) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states [T, M] and what is paid [K, T], whose logarithm is score of them."""
    hidden = [noise(seed + n, 400, HIDDEN_SIZE) * 3 + 1 for n in range(3)]
    return [(rows, score(rows).exp().T) for rows in hidden]


@pytest.mark.parametrize("units", [0, UNITS])
def test_what_is_known_is_found_again(units):
    """A linear score by both forms, one with a bend by hidden units alone."""
    bend = units > 0
    fit, truths = KVzapFit(FACTS, units), {}
    for layer in range(3):
        weights, bias = noise(50 + layer, HIDDEN_SIZE, 2) * 0.3, noise(60 + layer, 2) - 8

        def score(rows, weights=weights, bias=bias):
            found = rows @ weights + bias
            return bias + (found - bias).abs() if bend else found

        truths[layer] = score
        for hidden, reached in documents(10 * layer, score):
            fit.add(layer, hidden, reached)
    stats = query_stats(FACTS).with_kvzap(fit.build())
    assert stats.metadata.kvzap_units == units
    for layer, score in truths.items():
        ((hidden, _), *_) = documents(100 + layer, score)
        wanted, found = score(hidden), token_scores(hidden, stats.layer(layer))
        left = (found - wanted).square().mean() / wanted.var()
        assert left < (0.2 if bend else 0.01), f"layer {layer}: {left:.3f} of the variance is left"


def test_a_fit_needs_every_layer():
    fit = KVzapFit(FACTS)
    with pytest.raises(InvalidArgumentError, match="layer 0 has no token"):
        fit.build()


def test_one_heads_share_of_statistics_leaves_hidden_units_alone():
    stats = query_stats(FACTS)
    own = stats.layer(1).kv_head(1, 2)
    assert torch.equal(own.kvzap_in, stats.kvzap_in[1])
    assert torch.equal(own.kvzap_out, stats.kvzap_out[1, 1:])
    shard = stats.shard(slice(2, 4), slice(1, 2))
    assert torch.equal(shard.kvzap_in, stats.kvzap_in)
    assert torch.equal(shard.kvzap_out, stats.kvzap_out[:, 1:])


def test_equal_weights_have_one_digest_and_others_another():
    def digest(seed: int) -> str:
        return Compressor(CompressionConfig("kvzap"), FACTS, query_stats(FACTS, seed=seed)).weights_digest

    assert digest(0) == digest(0) != digest(1)


def test_statistics_without_weights_or_of_other_hidden_states_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"weights of hidden states.*--kvzap linear"):
        Compressor(CompressionConfig("kvzap"), FACTS, query_stats(FACTS, surrogate=False))
    blind = dataclasses.replace(FACTS, hidden_size=None)
    with pytest.raises(StatsMismatchError, match="given none that could be seen"):
        Compressor(CompressionConfig("kvzap"), blind, query_stats(FACTS))
    with pytest.raises(InvalidArgumentError, match="do not show what they are given"):
        KVzapFit(blind)
