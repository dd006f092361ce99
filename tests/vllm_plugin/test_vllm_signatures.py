"""A vLLM that is not the one that the plugin was written against is refused, with every difference."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import start_check
import vllm
from configs import make_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.core.block_pool import BlockPool

from kvreclaim.errors import UnsupportedVllmError
from kvreclaim.integrations.vllm.refusals import check, expect, signatures
from kvreclaim.integrations.vllm.settings import family

POOL = start_check.NEEDED, start_check.PER_BLOCK


def test_the_installed_vllm_is_as_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    counts = re.findall(r"^(.*): (\d+) of \d+$", capsys.readouterr().out, re.MULTILINE)
    assert dict(counts) | {check.LEFT_OUT: ""} == dict.fromkeys(check.CHANGES, "0") | {check.LEFT_OUT: ""}


def test_every_difference_is_named_at_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free_blocks(self: Any, ordered_blocks: Any, prepend: bool = False) -> None: ...

    monkeypatch.setattr(BlockPool, "free_blocks", free_blocks)
    monkeypatch.delattr(BlockPool, "evict_blocks")
    with pytest.raises(UnsupportedVllmError) as caught:
        signatures.check_core()
    for part in (
        "kvreclaim 0.",
        f"vLLM {vllm.__version__}",
        "BlockPool.free_blocks is (self, ordered_blocks, prepend=False), expected (self, ordered_blocks)",
        "BlockPool.evict_blocks is missing",
        "0.32.*",
        "docs/vllm.md",
    ):
        assert part in str(caught.value)
    signatures.check_front()


def test_a_changed_front_end_stops_the_configuration_only_with_compression(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = start_check.PER_BLOCK
    monkeypatch.setattr(start_check.MODULE, name, lambda vllm_config, groups, layout: 0)
    with pytest.raises(UnsupportedVllmError, match=rf"{name} is \(vllm_config, groups, layout\)"):
        make_config(tiny_model)
    assert make_config(tiny_model, None).scheduler_config.scheduler_cls is None


def test_a_page_says_what_another_version_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """0.32 and 0.33, each read by the other's table, as a next version is read by the newest one."""
    other = next(name for name in family.FAMILIES if name != family.minor(vllm.__version__))
    assert check.main(["--against", other]) == 1
    page = capsys.readouterr().out
    assert page.startswith(f"vLLM {vllm.__version__} and what kvreclaim ")
    assert len(page.splitlines()) <= 66
    moved = f"  {family.FAMILIES[other].pool_check.module}:{start_check.NEEDED}  [front]\n"
    assert moved in page.partition(f"\n{check.OTHER}")[0]
    row = "KVCacheManager.get_computed_blocks is (self, request"
    assert row in page.partition(f"\n{check.OTHER}")[2].partition(f"\n{check.SOURCE}")[0]
    assert "Scheduler.schedule  [core]" in page.partition(f"\n{check.SOURCE}")[2]


def test_an_unknown_version_is_read_by_the_newest_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def get_new_blocks(self: Any, num_blocks: int) -> Any: ...

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(BlockPool, "get_new_blocks", get_new_blocks)
    monkeypatch.setattr(BlockPool, "touch", lambda self: None)
    monkeypatch.delattr(BlockPool, "evict_blocks")
    assert check.main([]) == 1
    page = capsys.readouterr().out
    assert page.startswith("vLLM 0.99.0 and what kvreclaim ")
    assert f"of vLLM {list(family.FAMILIES)[-1]}\n" in page
    gone, other, source = re.split(r"\n(?:other parameters|another source alone): ", page)
    assert "BlockPool.evict_blocks  [core]" in gone
    assert "BlockPool.touch is (self), expected (self, blocks)  [core]" in other
    assert "BlockPool.get_new_blocks  [core]" in source


def test_the_printed_changes_are_the_ones_we_have(capsys: pytest.CaptureFixture[str]) -> None:
    first = next(iter(family.FAMILIES))
    check.main(["--against", first, "--table"])
    printed = {line for line in capsys.readouterr().out.splitlines() if line.startswith(("vllm.", "- "))}
    changes = "".join(family.find_family().expected()[1:]).splitlines()
    ours = {line for line in changes if line.startswith(("vllm.", "- ")) and "flashinfer" not in line}
    assert printed - ours == set()
    added = {line.partition("(")[0] for line in ours - printed}
    assert added == ({f"{start_check.CHECK.module}:{name}" for name in POOL} if ours else set())


def test_a_subclass_that_overrides_otherwise_differs() -> None:
    class Odd(BlockPool):  # type: ignore[misc]
        def free_blocks(self, ordered_blocks: Any, later: bool = False) -> None: ...

    rows = [row for row in signatures.sections()["core"] if ":BlockPool." in row.where]
    expect.check_overrides(BlockPool, rows)
    with pytest.raises(
        UnsupportedVllmError, match=r"Odd.free_blocks is \(self, ordered_blocks, later=False\)"
    ):
        expect.check_overrides(Odd, rows)


def test_the_attention_backend_in_use_is_looked_at() -> None:
    class Odd(CPUAttentionBackendImpl):  # type: ignore[misc]
        def do_kv_cache_update(self, layer: Any, kv: Any, kv_cache: Any, slot_mapping: Any) -> None: ...

    def layer(kind: type) -> Any:
        backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        return SimpleNamespace(attn_backend=backend, kv_cache_dtype="auto", impl=kind.__new__(kind))

    signatures.check_layers([layer(CPUAttentionBackendImpl)])
    with pytest.raises(UnsupportedVllmError, match=r"Odd.do_kv_cache_update is \(self, layer, kv, kv_cache"):
        signatures.check_layers([layer(CPUAttentionBackendImpl), layer(Odd)])


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0.0"])
def test_an_unknown_version_is_refused_only_with_compression(
    version: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(UnsupportedVllmError, match=rf"not know vLLM {version}; known: 0\.32\.\*, 0\.33\.\*"):
        make_config(tiny_model)
    assert make_config(tiny_model, None).scheduler_config.scheduler_cls is None
