"""A model with packed weights loads, and answers, in little more memory than they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file

from kvreclaim import demo_model
from kvreclaim.ops import extension

pytestmark = [
    pytest.mark.skipif(
        extension.unavailable_reason() is not None, reason="the native extension is not there"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="the count is Linux's"),
]
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
GROUP = 128
MARGIN = 1.15
ACTIVATIONS = 24 << 20
"""And modules that are loaded late, and pieces of a matrix that are unpacked."""
CHILD = """
import gc, json, sys, threading, time
from transformers import LlamaConfig  # imports much else
from kvreclaim import LLM, SamplingParams

def taken():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def watch():
    while not done:
        peaks.append(taken())
        time.sleep(0.001)

small, large = sys.argv[1:]
common = dict(num_blocks=16, max_num_seqs=1, max_model_len=64)
params = SamplingParams(max_tokens=2, ignore_eos=True)
llm = LLM(small, **common)
llm.generate([[1, 2, 3]], params)
del llm
gc.collect()
before, peaks, done = taken(), [], False
watcher = threading.Thread(target=watch)
watcher.start()
llm = LLM(large, **common)
(answer,) = llm.generate([[1, 2, 3]], params)
done = True
watcher.join()
print(json.dumps([llm.loaded.weight_bytes, max(peaks) - before, answer.error]))
"""


def write_awq(directory: Path) -> int:
    """A random checkpoint. Returns: bytes of its file."""
    model = tiny.build("llama", **SHAPE)
    model.config.save_pretrained(directory)
    tensors = {}
    for name, parameter in model.named_parameters():
        rows, columns = parameter.shape[0], parameter.shape[-1]
        if parameter.dim() == 1 or "proj" not in name:
            tensors[name] = parameter.detach().bfloat16()
            continue
        stem = name.removesuffix("weight")
        tensors[f"{stem}qweight"] = torch.randint(-(2**31), 2**31, (columns, rows // 8)).to(torch.int32)
        tensors[f"{stem}qzeros"] = torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
        tensors[f"{stem}scales"] = torch.full((columns // GROUP, rows), 0.007, dtype=torch.float16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    config["quantization_config"]["zero_point"] = True
    (directory / "config.json").write_text(json.dumps(config))
    return (directory / "model.safetensors").stat().st_size


def test_memory_is_little_more_than_the_packed_weights(tmp_path: Path) -> None:
    size = write_awq(tmp_path)
    command = [sys.executable, "-c", CHILD, str(demo_model()), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    weight_bytes, peak, error = json.loads(done.stdout.splitlines()[-1])
    assert error is None
    assert weight_bytes == pytest.approx(size, rel=0.05)
    assert weight_bytes < peak < size * MARGIN + ACTIVATIONS
    assert size > 2 * ACTIVATIONS
