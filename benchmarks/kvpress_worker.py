"""NVIDIA's kvpress on rows of token ids, for compare_kvpress.py: a JSON object a line in, several out.

kvpress wants an older transformers than kvreclaim. So this runs in an environment of its own and imports
nothing of kvreclaim.

in:  {"prompt": [token ids], "compress_at": leading tokens that are compressed, "max_new_tokens",
      "cells": [[press, share of the context's keys that stays], ...]}
out: for each cell {"press", "share", "text", "num_generated", "kept": share of the keys that stayed,
      "kv_tokens": tokens that a head holds at the end, "prompt_s", "answer_s"},
     or {"press", "share", "refused": reason}
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import kvpress as kp
import torch
from kvpress.utils import extract_keys_and_values
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline

PRESSES: dict[str, Callable[[float], Any]] = {
    "full": lambda ratio: None,
    "kvzip": lambda ratio: kp.KVzipPress(ratio),
    "expected_attention": lambda ratio: kp.ExpectedAttentionPress(ratio),
    "adakv(expected_attention)": lambda ratio: kp.AdaKVPress(kp.ExpectedAttentionPress(ratio, epsilon=1e-2)),
    "criticalkv(expected_attention)": lambda ratio: kp.CriticalAdaKVPress(
        kp.ExpectedAttentionPress(ratio, use_vnorm=False)
    ),
    "snapkv": lambda ratio: kp.SnapKVPress(ratio),
    "adakv(snapkv)": lambda ratio: kp.AdaKVPress(kp.SnapKVPress(ratio)),
    "criticalkv(snapkv)": lambda ratio: kp.CriticalAdaKVPress(kp.SnapKVPress(ratio)),
    "pyramidkv": lambda ratio: kp.PyramidKVPress(ratio),
    "keydiff": lambda ratio: kp.KeyDiffPress(ratio),
    "knorm": lambda ratio: kp.KnormPress(ratio),
    "lagkv": lambda ratio: kp.LagKVPress(ratio),
    "streaming_llm": lambda ratio: kp.StreamingLLMPress(ratio),
    "tova": lambda ratio: kp.TOVAPress(ratio),
    "compactor": lambda ratio: kp.CompactorPress(ratio),
}
Cell = tuple[str, float]


class Refusals(dict[Cell, str]):
    """Cell -> why kvpress cannot run it."""

    @contextmanager
    def of(self, cell: Cell) -> Iterator[None]:
        """kvpress says what it does not support by exceptions of all kinds."""
        try:
            yield
        except Exception as error:
            self[cell] = f"{type(error).__name__}: {error}"


class SharedPrefill:
    """Caches that several presses make of one context, which is computed once: a press sees a layer's keys
    after the layer's attention, and changes nothing that later layers read."""

    def __init__(self, model: Any, presses: dict[Cell, Any], refusals: Refusals) -> None:
        self.model, self.presses, self.refusals = model, presses, refusals
        self.layers = [layer.self_attn for layer in model.model.layers]
        self.kept: dict[Cell, list[tuple[torch.Tensor, torch.Tensor, Any]]] = {cell: [] for cell in presses}
        for cell, press in presses.items():
            with refusals.of(cell):
                press.post_init_from_model(model)

    def run(self, context: torch.Tensor) -> DynamicCache:
        """The full cache."""
        cache, hooks = DynamicCache(), []
        for layer in self.layers:
            layer.rotary_emb = self.model.model.rotary_emb
            hooks.append(layer.register_forward_hook(self._compress, with_kwargs=True))
        try:
            self.model.model(input_ids=context, past_key_values=cache)
        finally:
            for hook in hooks:
                hook.remove()
        return cache

    def _compress(self, module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        keys, values = extract_keys_and_values(kwargs["past_key_values"], module.layer_idx)
        for cell, press in self.presses.items():
            if cell in self.refusals:
                continue
            module.masked_key_indices = None
            with self.refusals.of(cell):
                left = press.compress(module, kwargs["hidden_states"], keys, values, output[1], kwargs)
                self.kept[cell].append((*left, module.masked_key_indices))
        module.masked_key_indices = None

    def cache_of(self, cell: Cell) -> tuple[DynamicCache, list[Any]]:
        """A press's cache, and the positions that its layers mask."""
        cache = DynamicCache()
        for index, (keys, values, _) in enumerate(self.kept[cell]):
            cache.update(keys, values, index)
        return cache, [masked for _, _, masked in self.kept[cell]]


class Worker:
    """One model, its rows one after the other."""

    def __init__(self, directory: str, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        tokenizer = AutoTokenizer.from_pretrained(directory)
        self.pipe = pipeline("kv-press-text-generation", model=self.model, tokenizer=tokenizer)
        self.layers = [layer.self_attn for layer in self.model.model.layers]

    def _now(self) -> float:
        """Seconds, once the device has done its work."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @torch.inference_mode()
    def answers(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """One row under each of its cells."""
        cells, refusals = [(press, share) for press, share in row["cells"]], Refusals()
        for cell, answer in self._all(row, cells, refusals):
            yield {"press": cell[0], "share": cell[1]} | answer
        for cell, why in refusals.items():
            yield {"press": cell[0], "share": cell[1], "refused": why}

    def _all(
        self, row: dict[str, Any], cells: list[Cell], refusals: Refusals
    ) -> Iterator[tuple[Cell, dict[str, Any]]]:
        ids = torch.tensor([row["prompt"]], device=self.model.device)
        context, question = ids[:, : row["compress_at"]], ids[:, row["compress_at"] :]
        kvzip = [cell for cell in cells if cell[0] == "kvzip"]
        presses = {c: press for c in cells if c not in kvzip and (press := PRESSES[c[0]](1 - c[1]))}
        shared, started = SharedPrefill(self.model, presses, refusals), self._now()
        full = shared.run(context)
        seconds = self._now() - started
        for cell in cells:
            if cell not in kvzip and cell not in refusals:
                with refusals.of(cell):
                    cache, masks = (
                        shared.cache_of(cell)
                        if cell in presses
                        else (copy.deepcopy(full), [None] * len(self.layers))
                    )
                    yield cell, self._answer(row, cache, masks, question, seconds)
        if kvzip:
            yield from self._kvzip(row, context, question, kvzip, refusals)

    def _kvzip(
        self,
        row: dict[str, Any],
        context: torch.Tensor,
        question: torch.Tensor,
        cells: list[Cell],
        refusals: Refusals,
    ) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """KVzip repeats the context once for all shares: its scores do not depend on the share."""
        press, cache, started = PRESSES["kvzip"](0.5), DynamicCache(), self._now()
        scores: list[torch.Tensor] = []
        compress = press.compress_post
        press.compress_post = lambda model: scores.append(press.score_val.clone())
        with refusals.of(cells[0]), press(self.model):
            self.model.model(input_ids=context, past_key_values=cache)
        seconds = self._now() - started
        if cells[0] in refusals:
            refusals.update(dict.fromkeys(cells, refusals[cells[0]]))
            return
        for cell in cells:
            press.compression_ratio, press.score_val = 1 - cell[1], scores[0].clone()
            with refusals.of(cell):
                compress(self.model)
                masks = [layer.masked_key_indices for layer in self.layers]
                yield cell, self._answer(row, copy.deepcopy(cache), masks, question, seconds)

    def _answer(
        self,
        row: dict[str, Any],
        cache: DynamicCache,
        masks: list[Any],
        question: torch.Tensor,
        prompt_s: float,
    ) -> dict[str, Any]:
        held = sum(layer.keys[..., 0].numel() for layer in cache.layers)
        held -= sum(len(mask[0]) for mask in masks if mask is not None)
        heads = sum(layer.keys.shape[1] for layer in cache.layers)
        before = cache.get_seq_length()
        for layer, mask in zip(self.layers, masks, strict=True):
            layer.masked_key_indices = mask
        started = self._now()
        text = self.pipe.generate_answer(question, cache, row["compress_at"], row["max_new_tokens"])
        answer_s = self._now() - started
        added = cache.get_seq_length() - before
        return {
            "text": text,
            "num_generated": added - question.shape[1] + 1,  # the last one is not in the cache
            "kept": held / heads / row["compress_at"],
            "kv_tokens": held / heads + added,
            "prompt_s": prompt_s,
            "answer_s": answer_s,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory of a transformers model; without it, print what is there")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args()
    if options.model is None:
        print(json.dumps({"version": version("kvpress"), "presses": list(PRESSES)}))
        return
    worker = Worker(options.model, getattr(torch, options.dtype))
    for line in sys.stdin:
        for answer in worker.answers(json.loads(line)):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
