"""Statistics: made, kept, read back, and refused."""

import dataclasses
import json
import os

import pytest
import torch
from compression_oracles import TENSORS, layer_facts, layout, model_facts, noise, query_stats, same_stats
from safetensors.torch import save_file

from kvreclaim.compression import stats as stats_module
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError
from kvreclaim.ops.key_source import DenseSource

FACTS = model_facts()


class TestOwnFile:
    @pytest.mark.parametrize("covariance", [False, True])
    @pytest.mark.parametrize(("num_centers", "shared"), [(0, False), (3, False), (3, True)])
    def test_round_trip(self, tmp_path, num_centers, shared, covariance):
        stats = query_stats(FACTS, num_centers, shared=shared, covariance=covariance)
        stats.save(tmp_path / "stats.safetensors")
        loaded = QueryStats.load(str(tmp_path / "stats.safetensors"))
        assert loaded.metadata == stats.metadata
        assert same_stats(stats, loaded)
        assert [file.name for file in tmp_path.iterdir()] == ["stats.safetensors"]

    def test_truncated_and_foreign_files(self, tmp_path):
        path = tmp_path / "stats.safetensors"
        query_stats(FACTS).save(path)
        whole = path.read_bytes()
        for broken in (b"", b"nonsense", whole[:40], whole[:-5]):
            path.write_bytes(broken)
            with pytest.raises(StatsMismatchError, match="no valid statistics file"):
                QueryStats.load(path)
        save_file({"x": torch.zeros(1)}, path)
        with pytest.raises(StatsMismatchError, match="metadata"):
            QueryStats.load(path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format_version": 1}, "format_version"),
            ({"num_layers": 4}, "q_mean"),
            ({"num_centers": 4}, "centers"),
            ({"num_centers": 0}, "absent"),
            ({"covariance": False}, "q_cov .* absent"),
            ({"shared_centers": True}, "centers"),
            ({"shared_centers": True, "num_kv_heads": None}, "KV heads must divide"),
            ({"shared_centers": True, "num_kv_heads": 3}, "KV heads must divide"),
            ({"surprise": 1}, "surprise"),
            ({"rope_style": "full"}, "rope_style"),
        ],
    )
    def test_metadata_that_lies(self, tmp_path, change, message):
        path, stats = tmp_path / "stats.safetensors", query_stats(FACTS)
        header = json.dumps(json.loads(stats.metadata.model_dump_json()) | change)
        save_file({name: getattr(stats, name) for name in TENSORS}, path, metadata={"kvreclaim": header})
        with pytest.raises(StatsMismatchError, match=message):
            QueryStats.load(path)

    @pytest.mark.parametrize("header", ["", "[]", "{", "{}"])
    def test_metadata_that_is_none(self, tmp_path, header):
        path = tmp_path / "stats.safetensors"
        save_file({"q_mean": torch.zeros(1)}, path, metadata={"kvreclaim": header})
        with pytest.raises(StatsMismatchError):
            QueryStats.load(path)

    @pytest.mark.parametrize("name", TENSORS)
    def test_a_tensor_that_is_missing_or_not_finite(self, tmp_path, name):
        path, stats = tmp_path / "stats.safetensors", query_stats(FACTS)
        header = {"kvreclaim": stats.metadata.model_dump_json()}
        tensors = {tensor: getattr(stats, tensor) for tensor in TENSORS}
        save_file({key: value for key, value in tensors.items() if key != name}, path, metadata=header)
        with pytest.raises(StatsMismatchError, match=name):
            QueryStats.load(path)
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[3] = torch.nan
        save_file(tensors, path, metadata=header)
        with pytest.raises(StatsMismatchError, match=f"{name} .* not finite"):
            QueryStats.load(path)

    def test_a_file_from_before_covariance_and_sharing(self, tmp_path):
        path, stats = tmp_path / "stats.safetensors", query_stats(FACTS, covariance=False, surrogate=False)
        header = json.loads(stats.metadata.model_dump_json())
        del header["covariance"], header["shared_centers"], header["features"], header["fractions"]
        tensors = {name: getattr(stats, name) for name in TENSORS[:5]}
        save_file(tensors, path, metadata={"kvreclaim": json.dumps(header)})
        assert same_stats(QueryStats.load(path), stats)

    def test_unknown_tensors(self, tmp_path):
        path, stats = tmp_path / "stats.safetensors", query_stats(FACTS, 0, covariance=False)
        tensors = {"q_mean": stats.q_mean, "q_abs_mean": stats.q_abs_mean, "extra": torch.zeros(1)}
        save_file(tensors, path, metadata={"kvreclaim": stats.metadata.model_dump_json()})
        with pytest.raises(StatsMismatchError, match="extra"):
            QueryStats.load(path)

    @pytest.mark.parametrize("name", ["stats.bin", "stats", "absent.pt", "absent.safetensors"])
    def test_other_names_and_absent_files(self, tmp_path, name):
        with pytest.raises(InvalidArgumentError, match=r"must end in|does not exist"):
            QueryStats.load(tmp_path / name)

    def test_is_saved_as_safetensors_only(self, tmp_path):
        with pytest.raises(InvalidArgumentError, match="safetensors"):
            query_stats(FACTS).save(tmp_path / "stats.pt")


class TestLayer:
    @pytest.mark.parametrize("shared", [False, True])
    def test_a_kv_head_has_its_group_and_its_centres(self, shared):
        stats = query_stats(FACTS, shared=shared)
        layer = stats.layer(1)
        one = layer.kv_head(1, 2)
        assert torch.equal(one.q_mean, stats.q_mean[1, 2:])
        assert torch.equal(one.q_cov, stats.q_cov[1, 2:])
        assert torch.equal(one.centers, stats.centers[1, 1:] if shared else stats.centers[1, 2:])

    def test_what_is_absent_stays_absent(self):
        layer = query_stats(FACTS, 0, covariance=False).layer(0)
        assert layer.kv_head(0, 2).centers is layer.to(torch.device("cpu")).q_cov is None


class TestShard:
    WHOLE = layer_facts()
    HALF = dataclasses.replace(WHOLE, num_heads=2, num_kv_heads=1)

    @pytest.mark.parametrize(
        ("policy", "shared"),
        [("query_mixture", False), ("query_mixture", True), ("expected_attention", False)],
    )
    def test_a_shard_keeps_what_its_heads_keep_in_the_whole(self, policy, shared):
        stats = query_stats(FACTS, shared=shared)
        config = CompressionConfig(policy, budget=6, sinks=1, recent=2, mode="per_layer_head")
        keys, values = noise(1, 2, 15, 8), noise(2, 2, 15, 8)
        whole = Compressor(config, FACTS, stats).choose(lambda _: DenseSource(keys, values), 15, 0, 40)
        local = dataclasses.replace(FACTS, layers=(self.HALF,) * 3)
        for rank in range(2):
            part = stats.shard(slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1))
            part.check_model(local)
            source = DenseSource(keys[rank : rank + 1], values[rank : rank + 1])
            kept = Compressor(config, local, part).choose(lambda _, s=source: s, 15, 0, 40)
            assert torch.equal(kept, whole[:, rank : rank + 1])

    @pytest.mark.parametrize("shared", [False, True])
    def test_ranks_that_hold_the_same_kv_head_have_its_centres(self, shared):
        stats = query_stats(FACTS, shared=shared)
        part = stats.shard(slice(3, 4), slice(1, 2))
        assert (part.metadata.num_heads, part.metadata.num_kv_heads) == (1, 1)
        assert torch.equal(part.q_mean, stats.q_mean[:, 3:])
        assert torch.equal(part.q_cov, stats.q_cov[:, 3:])
        assert torch.equal(part.centers, stats.centers[:, 1:] if shared else stats.centers[:, 3:])
        assert part.center_weight.shape == (3, 1, 3)

    def test_what_is_absent_or_unknown_stays_so(self):
        stats = query_stats(FACTS, 0, covariance=False, surrogate=False)
        metadata = stats.metadata.model_copy(update={"num_kv_heads": None})
        part = dataclasses.replace(stats, metadata=metadata).shard(slice(0, 2), slice(0, 1))
        assert part.metadata == metadata.model_copy(update={"num_heads": 2})
        assert part.centers is part.q_cov is part.surrogate is part.head_shares is None

    def test_the_whole_is_a_shard_of_itself(self):
        stats = query_stats(FACTS, shared=True)
        part = stats.shard(slice(0, 4), slice(0, 2))
        assert part.metadata == stats.metadata
        assert same_stats(part, stats)


class TestCheckModel:
    def test_its_own_model_passes(self):
        query_stats(FACTS).check_model(FACTS)

    @pytest.mark.parametrize(
        ("facts", "message"),
        [
            (model_facts(4), "layers 3, the model has 4"),
            (dataclasses.replace(FACTS, fingerprint="0" * 64), "fingerprint"),
            (model_facts(rope=layout(4, "interleaved")), "rope_style half, the model has interleaved"),
            (model_facts(rope=layout(3)), "rotary bands 4, the model has 3"),
            (
                dataclasses.replace(FACTS, layers=(layer_facts(head_dim=16),) * 3),
                "head_dim 8, the model has 16",
            ),
        ],
    )
    def test_what_differs_is_reported(self, facts, message):
        with pytest.raises(StatsMismatchError, match=message):
            query_stats(FACTS).check_model(facts)

    def test_heads(self):
        layers = tuple(dataclasses.replace(layer, num_heads=8, num_kv_heads=4) for layer in FACTS.layers)
        with pytest.raises(
            StatsMismatchError, match="query heads 4, the model has 8; KV heads 2, the model has 4"
        ):
            query_stats(FACTS).check_model(dataclasses.replace(FACTS, layers=layers))

    def test_the_config(self):
        facts = dataclasses.replace(FACTS, config={"eps": 0.1, "theta": {"a": 1}, "new": 1})
        stats = query_stats(FACTS)
        stats.check_model(facts)  # measured without a config, and the model has its own
        with pytest.raises(StatsMismatchError, match="eps as in the model's files, hf_overrides changes it"):
            stats.check_model(dataclasses.replace(facts, overridden=("eps",)))

        def measured(**config):
            metadata = stats.metadata.model_copy(update={"config": config})
            return dataclasses.replace(stats, metadata=metadata)

        same = measured(eps=0.1, theta={"a": 1}, gone=2)
        same.check_model(dataclasses.replace(facts, overridden=("eps",)))
        same.check_model(FACTS)
        with pytest.raises(StatsMismatchError, match=r"eps 0.2, the model has 0.1; theta {'a': 2}"):
            measured(eps=0.2, theta={"a": 2}).check_model(facts)


def test_two_processes_with_equal_ids_save_at_once(tmp_path, monkeypatch):
    """Two containers may share a volume: the second saves while the first is in the middle."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    target, save = tmp_path / "stats.safetensors", stats_module.save_file

    def other_first(tensors, path, **kwargs):
        save(tensors, path, **kwargs)
        monkeypatch.setattr(stats_module, "save_file", save)
        query_stats(FACTS).save(target)
        assert path.exists()

    monkeypatch.setattr(stats_module, "save_file", other_first)
    query_stats(FACTS).save(target)
    QueryStats.load(target)
    assert list(tmp_path.iterdir()) == [target]
