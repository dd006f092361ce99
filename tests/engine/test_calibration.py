"""Statistics equal moments of the queries that transformers computes, and survive their file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.calibrate.calibration import calibrate, pieces, read_documents
from kvreclaim.compression.head_shares import FRACTIONS
from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.capture import capture_queries
from kvreclaim.model.loader import load_model

DOCUMENTS = tiny.prompts((40, 3, 25), seed=8)
BANDS = {  # real dims of the bands, imaginary dims
    "glm4": ([0, 2, 4, 6], [1, 3, 5, 7]),
    "llama4": (list(range(0, 16, 2)), list(range(1, 16, 2))),
    "deepseek-v2": ([32, 34, 36, 38], [33, 35, 37, 39]),
    "deepseek-v3": ([16, 17, 18, 19], [20, 21, 22, 23]),
}
INTERLEAVED = ("glm4", "deepseek-v2", "llama4")


def load(family: str, tiny_dir):
    return load_model(tiny_dir(family), dtype="float32", device="cpu")


def tensors(stats: QueryStats) -> dict[str, torch.Tensor | None]:
    return {f.name: getattr(stats, f.name) for f in fields(stats) if f.name != "metadata"}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_moments_equal_those_of_hooked_queries(family, tiny_dir) -> None:
    stats = calibrate(load(family, tiny_dir), DOCUMENTS, num_centers=0)
    real, imag = BANDS.get(family, (list(range(8)), list(range(8, 16))))
    for layer, q in enumerate(tiny.queries_before_rope(tiny_dir(family), DOCUMENTS)):
        q = q.double()
        size = (q[..., real].square() + q[..., imag].square()).sqrt().mean(1)
        if (family, layer) in (("smollm3", 1), ("llama4", 3)):  # no rotation
            size = torch.zeros_like(size)
        got = stats.layer(layer)
        torch.testing.assert_close(got.q_mean.double(), q.mean(1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.q_abs_mean.double(), size, atol=1e-4, rtol=1e-4)
    assert stats.metadata.num_tokens == sum(map(len, DOCUMENTS))
    assert stats.metadata.rope_style == ("interleaved" if family in INTERLEAVED else "half")


def test_centres_divide_the_queries_among_them(tiny_dir) -> None:
    """Weighted, they are the mean again; with one centre for each query they are the queries."""
    loaded = load("qwen3", tiny_dir)
    stats = calibrate(loaded, DOCUMENTS, num_centers=4)
    weights = stats.center_weight
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4))
    mean = (weights[..., None] * stats.centers).sum(2)
    torch.testing.assert_close(mean, stats.q_mean, atol=1e-5, rtol=1e-4)
    few = calibrate(loaded, [DOCUMENTS[1]], num_centers=3)
    for layer, q in enumerate(tiny.queries_before_rope(tiny_dir("qwen3"), [DOCUMENTS[1]])):
        distance = torch.cdist(q, few.centers[layer]).amin(-1)
        assert distance.max() < 1e-3 * q.norm(dim=-1).max()


@pytest.mark.parametrize("policy", ["triattention", "query_mixture"])
def test_a_file_of_statistics_serves_as_the_statistics_do(policy, tiny_dir, tmp_path: Path) -> None:
    llm = LLM(tiny_dir("qwen3"), dtype="float32", device="cpu", num_blocks=100)
    stats = calibrate(llm.loaded, DOCUMENTS, num_centers=4)
    path = tmp_path / "stats.safetensors"
    stats.save(path)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = tiny.prompts((60, 30), seed=9)
    limits = {"policy": policy, "budget": 24, "interval": 8, "sinks": 2, "recent": 4}
    answers = []
    for source in (stats, path, str(path)):
        outputs = llm.generate(prompts, greedy, CompressionConfig(**limits, stats=source))
        assert all(output.error is None for output in outputs)
        assert all(output.metrics.tokens_evicted > 0 for output in outputs)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] != [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]


@pytest.mark.parametrize("documents", [[], [[]], [[1], []]])
def test_nothing_to_calibrate_on_is_an_error(documents, tiny_dir) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one token"):
        calibrate(load("llama", tiny_dir), documents)


class TestReadDocuments:
    """Byte-level tokens without merges: one token is one letter of these texts."""

    @pytest.fixture
    def read(self, tiny_dir, tmp_path: Path):
        loaded = load("llama", tiny_dir)

        def read(text: str, **limits) -> list[str]:
            file = tmp_path / "text.txt"
            file.write_text(text, encoding="utf-8")
            documents = read_documents(loaded, file, **{"max_tokens": 1000, "context": 8192, **limits})
            assert all(documents)
            return [loaded.tokenizer.decode(document) for document in documents]

        return read

    def test_windows_hold_at_most_the_context(self, read) -> None:
        assert read("abcdefghij", context=4) == ["abcd", "efgh", "ij"]
        assert read("abcdefgh", context=4) == ["abcd", "efgh"]

    def test_documents_begin_after_a_line_of_dashes(self, read) -> None:
        assert read("abc\nde\n---\nf\n---\ngh") == ["abc\nde", "f", "gh"]
        assert read("ab---c\n--- \nd") == ["ab---c\n--- \nd"]
        assert read("---\nab\n---\n---\ncd\n---") == ["ab", "cd"]
        assert read("abcde\n---\nfgh", context=4) == ["abcd", "e", "fgh"]

    @pytest.mark.parametrize(
        ("limit", "left"),
        [
            (1, ["a"]),
            (4, ["abc", "d"]),
            (5, ["abc", "de"]),
            (6, ["abc", "de", "f"]),
            (99, ["abc", "de", "fg"]),
        ],
    )
    def test_reading_ends_at_max_tokens(self, limit, left, read) -> None:
        assert read("abcde\n---\nfg", context=3, max_tokens=limit) == left

    def test_the_context_is_at_most_the_models(self, read) -> None:
        assert list(map(len, read("a" * 1000, context=800))) == [512, 488]
        assert list(map(len, read("a" * 1000))) == [512, 488]

    def test_text_is_utf8(self, read) -> None:
        assert read("é👧") == ["é👧"]

    def test_an_empty_text_is_an_error(self, read) -> None:
        with pytest.raises(InvalidArgumentError, match=r"text\.txt' is empty"):
            read("")

    @pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"])
    def test_a_file_that_cannot_be_read(self, content, tiny_dir, tmp_path: Path) -> None:
        if content is not None:
            (tmp_path / "text.txt").write_bytes(content)
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            read_documents(load("llama", tiny_dir), tmp_path / "text.txt", max_tokens=10, context=10)

    def test_a_model_without_tokenizer_reads_no_text(self, tiny_dir, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgumentError, match="has no tokenizer"):
            read_documents(load("qwen3", tiny_dir), tmp_path / "text.txt", max_tokens=10, context=10)


def paid_the_first_copy(model, document: list[int]) -> list[torch.Tensor]:
    """[K, n] of each layer, from the attention probabilities that transformers gives."""
    length = len(document)
    with torch.no_grad():
        layers = model(torch.tensor([document * 2]), output_attentions=True).attentions
    far = torch.arange(2 * length)[:, None] - torch.arange(length) > 64
    heads = model.config.num_key_value_heads
    paid = [(p[0, :, :, :length] * far).unflatten(0, (heads, -1)).amax(1) for p in layers]
    cut = length * 3 // 4
    return [torch.stack([p.amax(1) for p in rows.split([cut, length - cut, length], 1)]) for rows in paid]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral", "llama4"])
def test_what_the_second_copy_pays_the_first_is_what_transformers_says(family, tiny_dir) -> None:
    """Soft-capping and sliding windows included."""
    loaded, (document,) = load(family, tiny_dir), tiny.prompts((150,), seed=8)
    reference = AutoModelForCausalLM.from_pretrained(
        tiny_dir(family), dtype=torch.float32, attn_implementation="eager"
    )
    found = {}
    queries, once = {}, {}

    def on_reached(layer, index, keys, values, reached, _) -> None:
        assert index == 1, "the first is too short"
        found[layer] = keys, reached

    documents = [document[:30], document]
    capture_queries(loaded, documents, queries.__setitem__, on_reached=on_reached)
    capture_queries(loaded, documents, once.__setitem__)
    expected = paid_the_first_copy(reference, document)
    assert len(found) == len(expected)
    for layer, wanted in enumerate(expected):
        keys, reached = found[layer]
        torch.testing.assert_close(queries[layer], once[layer], atol=1e-4, rtol=1e-4)
        assert (3, *keys.shape[:2]) == reached.shape == wanted.shape
        torch.testing.assert_close(reached, wanted, atol=1e-5, rtol=1e-4)


def test_a_surrogate_is_fitted_where_a_document_is_long_enough(tiny_dir, tmp_path) -> None:
    loaded = load("llama", tiny_dir)
    short, long = tiny.prompts((100, 300), seed=8)
    stats = calibrate(loaded, [short, long], num_centers=0)
    stats.save(tmp_path / "stats.safetensors")
    assert stats.surrogate.shape == (2, 2, stats.metadata.features)
    assert stats.surrogate_age.shape == (2, 2, stats.metadata.ages)
    assert torch.equal(QueryStats.load(tmp_path / "stats.safetensors").surrogate, stats.surrogate)
    assert torch.equal(QueryStats.load(tmp_path / "stats.safetensors").surrogate_age, stats.surrogate_age)
    assert stats.head_shares.shape == (2, 2, len(FRACTIONS))
    torch.testing.assert_close(stats.head_shares.mean(dim=(0, 1)), torch.tensor(FRACTIONS), atol=1e-3, rtol=0)
    assert torch.equal(QueryStats.load(tmp_path / "stats.safetensors").head_shares, stats.head_shares)
    assert calibrate(loaded, [short], num_centers=0).surrogate is None
    bare = calibrate(loaded, [long], num_centers=0, surrogate=False)
    assert bare.surrogate is bare.head_shares is None
    assert [len(piece) for piece in pieces([long, short], 128)] == [128, 128, 44, 100]
