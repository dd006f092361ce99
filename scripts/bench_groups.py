"""Layers with sliding windows in tables of their own beside one table for all layers: the same random model
of Gemma 3's layout, in one run, equal tokens first.

OMP_NUM_THREADS=2 python scripts/bench_groups.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from kvreclaim import LLM, SamplingParams

SIZE = 16


def save_model(directory: str, layers: int, window: int) -> None:
    """Five layers with windows to one with full attention."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=4096,
        sliding_window=window,
        max_position_embeddings=32_768,
        query_pre_attn_scalar=64,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(directory)


def engine(directory: str, given: argparse.Namespace, num_bytes: int, *, grouped: bool) -> LLM:
    """With a pool of so many bytes."""
    block_bytes = given.layers // 6 * 4 * 64 * 2 * 2 * SIZE * (1 if grouped else 6)
    return LLM(
        directory,
        dtype="bfloat16",
        device="cpu",
        num_blocks=num_bytes // block_bytes,
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=not grouped,
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )


def run(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float, int]:
    """Tokens, seconds from the first step that only decodes on per step, most sequences at once."""
    steps: list[tuple[int, float]] = []
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def see(step: object) -> None:
        steps.append((step.num_running, step.elapsed_s if not step.num_prefill_tokens else 0.0))

    outputs = llm.generate(prompts, params, on_step=see)
    decode = [seconds for _, seconds in steps if seconds]
    return [out.outputs[0].token_ids for out in outputs], median(decode), max(count for count, _ in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    prompts = [
        torch.randint(1, 4096, (given.context,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in range(given.batch)
    ]
    one_sequence = given.layers * 4 * 64 * 2 * 2 * (given.context + given.tokens)
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory, given.layers, given.window)
        roomy = {
            g: engine(directory, given, 2 * given.batch * one_sequence, grouped=g) for g in (False, True)
        }
        seconds: dict[bool, list[float]] = {False: [], True: []}
        found = {}
        for _ in range(given.rounds):
            for grouped, llm in roomy.items():
                found[grouped], each, _ = run(llm, prompts, given.tokens)
                seconds[grouped].append(each)
        same = sum(a == b for a, b in zip(found[False], found[True], strict=True))
        print(f"outputs that are the same: {same} of {given.batch} (bf16)")
        ours, other = median(seconds[True]), median(seconds[False])
        steps = f"{1e3 * ours:.2f} ms grouped, {1e3 * other:.2f} ms with one table"
        print(f"decode step: {steps}, {other / ours:.2f} x")
        for grouped in (False, True):
            tight = engine(directory, given, 3 * one_sequence, grouped=grouped)
            started = time.perf_counter()
            _, _, most = run(tight, prompts, 8 * given.tokens)
            name = "grouped" if grouped else "one table"
            print(
                f"{name}: {most} sequences at once in the memory of 3, {time.perf_counter() - started:.1f} s"
            )


if __name__ == "__main__":
    main()
