"""Settings of the compression are bound once, few are kept, and statistics are read once for all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from settings import small

from kvreclaim.compression.config import MAX_KEPT
from kvreclaim.compression.stats import QueryStats
from kvreclaim.model_paths import STATS_FILE


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The files of statistics that have been read."""
    files: list[str] = []
    load = QueryStats.load

    def noting(path):
        files.append(str(path))
        return load(path)

    monkeypatch.setattr(QueryStats, "load", noting)
    return files


def test_a_file_is_read_once_whatever_the_settings(calibrated_dir, make_llm, reads) -> None:
    llm = make_llm("qwen3")
    for budget in range(24, 64):
        assert llm.compressor(small("triattention", budget=budget)).stats_of(0) is not None
        assert llm.compressor(small("expected_attention", budget=budget)).stats_of(0) is not None
    assert reads == [str(llm.stats_file)]
    other = calibrated_dir("qwen3") / ".." / calibrated_dir("qwen3").name / STATS_FILE
    llm.compressor(small("triattention", stats=str(other)))
    assert reads == [str(llm.stats_file), str(other)]


def test_two_threads_that_ask_at_once_get_the_same(make_llm, reads) -> None:
    llm, config = make_llm("qwen3"), small("triattention")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: llm.compressor(config), range(8)))
    assert set(made) == {llm.compressors.kept(config)}
    assert reads == [str(llm.stats_file)]


def test_settings_share_the_statistics(make_llm) -> None:
    llm = make_llm("qwen3")
    one, two = (llm.compressor(small("triattention", budget=budget)).stats_of(1) for budget in (24, 32))
    assert one.q_mean.data_ptr() == two.q_mean.data_ptr()


def test_a_policy_that_needs_none_reads_none(make_llm, reads) -> None:
    make_llm("qwen3").compressor(small("knorm"))
    assert reads == []


def test_ever_new_settings_are_not_kept_for_ever(make_llm) -> None:
    llm = make_llm("qwen3")
    settings = [small("knorm", budget=24 + i) for i in range(MAX_KEPT)]
    made = [llm.compressor(config) for config in settings]
    assert [llm.compressor(config) for config in settings] == made
    llm.compressor(settings[0])
    llm.compressor(small("knorm", budget=500))
    assert llm.compressor(settings[0]) is made[0], "used since"
    assert llm.compressor(settings[1]) is not made[1], "the one that was not used for the longest time"
