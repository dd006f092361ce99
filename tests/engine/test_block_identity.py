"""Every engine option either changes no byte of a stored block, or blocks under it are found by it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import tiny
import tiny_gguf
import torch

from kvreclaim import LLM, SamplingParams
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.offload.store.session_file import SessionFile
from kvreclaim.ops import extension

PROMPT = tiny.prompts((25,), seed=4)[0] * 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True)
MIB = 2**-10
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}


@dataclass(frozen=True)
class Same:
    """The option does not change what is computed or stored.

    beside: other options of both engines
    """

    value: Any
    family: str = "llama"
    beside: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Cuts(Same):
    """The option cuts a prompt into other steps, as prefix hits within one engine do: sums in fp32 are
    the same to rounding."""


@dataclass(frozen=True)
class Names(Same):
    """The option is part of the namespace.

    field: of Namespace.FIELDS
    """

    field: str = ""


@dataclass(frozen=True)
class Apart(Same):
    """Blocks under the option are not stored, or not under the name of exact ones. error: of save_session"""

    error: str = "nothing of these .* tokens is cached"


OFFLOAD = (("kv_offloading_size", 8 * MIB),)
DISK = (*OFFLOAD, ("kv_offloading_disk_path", "disk"), ("kv_offloading_disk_size", 8 * MIB))
HYBRID = "qwen3-next"

OPTIONS: dict[str, Same] = {
    "block_size": Names(32, field="block_size"),
    "num_blocks": Same(64),
    "max_num_seqs": Same(1),
    "max_num_batched_tokens": Cuts(48),
    "max_model_len": Same(300),
    "disable_hybrid_kv_cache_manager": Same(True),
    "enable_prefix_caching": Apart(False),
    "state_checkpoints": Same(3, HYBRID),
    "state_checkpoint_interval": Cuts(32, HYBRID),
    "state_drafts": Same(2, HYBRID),
    "kv_memory_fraction": Same(0.1),
    "memory_limit": Same(64.0),
    "max_signal_bytes": Same(1 << 20),
    "seed": Same(7),
    "scheduling_policy": Same("cache"),
    "eviction_policy": Same("slru"),
    "spread_compression": Same(False),
    "prefix_snapshot_fraction": Same(0.5),
    "conversation_snapshots": Same(True),
    "max_pinned_fraction": Same(0.1),
    "kernels": Names("reference", field="backend_layout"),
    "threads": Same(2),
    "quantized_activations": Names("exact", "gguf", field="products"),
    "cache_packed_weights": Same(False, "gguf"),
    "hf_overrides": Names({"rms_norm_eps": 0.3}, field="config"),
    "kv_cache_dtype": Names("int8", field="kv_format"),
    "kv_cache_dtype_skip_layers": Apart("sliding_window", "mistral", (("kv_cache_dtype", "int8"),), "layers"),
    "kv_offloading_size": Same(8 * MIB),
    "full_cache_host_size": Apart(8 * MIB, error="full_cache_host_size"),
    "preemption_mode": Same("swap", beside=OFFLOAD),
    "swap_space": Same(2 * MIB, beside=OFFLOAD),
    "kv_offloading_state_fraction": Same(0.5, HYBRID, OFFLOAD),
    "preemption_victim": Same("lru"),
    "kv_offloading_write_policy": Same("write_through_selective", beside=OFFLOAD),
    "kv_offload_decode": Same(False, beside=OFFLOAD),
    "kv_offloading_disk_path": Same("disk", beside=(*OFFLOAD, ("kv_offloading_disk_size", 8 * MIB))),
    "kv_offloading_disk_size": Same(9 * MIB, beside=DISK),
    "kv_load_policy": Same("race", beside=DISK),
    "kv_load_timeout": Same(0.0, beside=DISK),
    "kv_offloading_disk_write_policy": Same("write_through_selective", beside=DISK),
    "kv_offloading_eviction_policy": Same("priority", beside=OFFLOAD),
    "speculative_config": Same(DRAFTS),
    "batch_invariant": Names(True, field="backend_layout"),
    "enforce_eager": Same(True),
    "sparse_prefill": Apart("pooled(alpha=0.5, first=0, block=32)"),
}


@pytest.fixture
def session(tmp_path: Path, tiny_dir: Callable[[str], Path], monkeypatch) -> Iterator[Any]:
    """(family, options) -> the session that an engine saves after a prompt and its answer."""
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def run(family: str, **options: Any) -> SessionFile:
        model = tmp_path / "tiny.gguf" if family == "gguf" else tiny_dir(family)
        if family == "gguf" and not model.exists():
            tiny_gguf.write(model)
        if "kv_offloading_disk_path" in options:  # a directory of its own, where nothing is found
            options["kv_offloading_disk_path"] = mkdtemp(dir=tmp_path)
        given = {"num_blocks": 96, "dtype": "auto" if family == "gguf" else "float32", **options}
        with LLM(model, device="cpu", **given) as llm:
            (output,) = llm.generate([PROMPT], GREEDY)
            assert output.error is None
            llm.save_session([*PROMPT, *output.outputs[0].token_ids], tmp_path / "a.session")
            return SessionFile.load(tmp_path / "a.session", llm.engine.sessions.fields)

    yield run
    torch.set_num_threads(threads)


def test_every_option_is_in_the_table() -> None:
    assert list(OPTIONS) == [field.name for field in fields(EngineConfig)]


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, session) -> None:
    option = OPTIONS[name]
    if option.family == "gguf" and extension.unavailable_reason() is not None:
        pytest.skip("the native extension is not there")
    beside = dict(option.beside)
    if isinstance(option, Apart):
        with pytest.raises(InvalidArgumentError, match=option.error):
            session(option.family, **beside, **{name: option.value})
        return
    plain, changed = (session(option.family, **(beside | more)) for more in ({}, {name: option.value}))
    named = {field for field, value in plain.fields.items() if changed.fields[field] != value}
    if isinstance(option, Names):
        assert option.field in named
        return
    assert not named
    assert plain.tensors.keys() == changed.tensors.keys()
    assert len(plain.tensors["blocks"]) >= 9
    for tensor, ours in plain.tensors.items():
        theirs = changed.tensors[tensor]
        if isinstance(option, Cuts) and tensor != "tokens":
            torch.testing.assert_close(*(t.view(torch.float32) for t in (ours, theirs)), atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(ours, theirs), tensor
