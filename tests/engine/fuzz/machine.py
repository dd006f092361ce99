"""One tiny model with statistics, and engines over it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import odd_policies
import pytest
import tiny
from alone import WORDS, Answer, Question
from lean import FIRST_SPECIAL, GUILTY, Boom, Lean, Whole
from operations import DROPS, Ask, Setup
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvreclaim import LLM, CompressionConfig
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression import registry
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policy import LayerView
from kvreclaim.engine.offload.states import OffloadedStates
from kvreclaim.engine.request.request import Request
from kvreclaim.model_paths import STATS_FILE
from kvreclaim.ops.formats import kv_format
from kvreclaim.ops.states import StateStore

BLOCK_SIZE = 4
MAX_MODEL_LEN = 96
ROOMY = 16
DRAFTS = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": FIRST_SPECIAL + 2,
    "eos_token_id": GUILTY,
}
WINDOWED: Mapping[str, Mapping[str, Any]] = {
    "ministral": {"head_dim": 8},
    "llama4": {
        "head_dim": 8,
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 2 * BLOCK_SIZE,
        "intermediate_size_mlp": 32,
        "moe_layers": [],
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
    },
}
"""Models with sliding windows, and with chunks."""
_SMALL = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
HYBRID: Mapping[str, Mapping[str, Any]] = {
    "qwen3-next": {**_SMALL, "linear_num_value_heads": 2, "linear_num_key_heads": 1},
    "falcon-h1": _SMALL,
    "lfm2": {"hidden_size": 64, "intermediate_size": 64},
}
"""Models with a delta rule, with Mamba 2 beside attention, with short convolutions."""


@dataclass(frozen=True)
class Brittle(Knorm):
    """Raises once when it is armed."""

    name = "brittle"
    armed: ClassVar[list[bool]] = [False]

    def score(self, view: LayerView) -> Tensor:
        if self.armed[0]:
            self.armed[0] = False
            raise Boom("a policy")
        return super().score(view)


class BrokenCopies:
    """States whose copies to the host, and from there, fail every so many times."""

    def __init__(self, store: StateStore, every: int) -> None:
        self.store, self.every, self.calls = store, every, 0

    def write_bytes(self, slot: int, row: Tensor) -> None:
        self._fail()
        self.store.write_bytes(slot, row)

    def read_bytes(self, slot: int, row: Tensor) -> None:
        self._fail()
        self.store.read_bytes(slot, row)

    def _fail(self) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            raise Boom("a copy")


class Machine:
    """State that all engines of a run share. texts: the prompts of which requests take the beginnings.

    family: llama, or one some of whose layers have windows, or are recurrent
    """

    def __init__(self, directory: Path, family: str = "llama") -> None:
        self._directory = directory
        path = tiny.save_model(family, directory, **SHAPE | WINDOWED.get(family, {}) | HYBRID.get(family, {}))
        for file in path.glob("token*"):  # of more ids than this model has
            file.unlink()
        words = {word: token for token, word in enumerate(WORDS)}
        backend = Tokenizer(models.WordLevel(words, unk_token=WORDS[0]))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
        how = {"dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE, "num_blocks": 256}
        llm = LLM(path, **how)
        lengths = (60, 60, 60, 140)
        *texts, long = [[token % FIRST_SPECIAL for token in text] for text in tiny.prompts(lengths, seed=5)]
        calibrate(llm.loaded, [*texts, long], num_centers=4, kvzap="mlp").save(path / STATS_FILE)
        llm = LLM(path, **how, hf_overrides={"max_position_embeddings": MAX_MODEL_LEN})
        self.texts = [text[:28] for text in texts]
        self.faults = (Whole if family in HYBRID else Lean)(llm.loaded.model)
        known = llm.score([texts[0]], [texts[1][:28]])[0].logprobs
        llm.loaded.model.forward = self.faults
        llm.engine.memory.reset_prefix_cache()
        lean = llm.score([texts[0]], [texts[1][:28]])[0].logprobs
        assert lean == pytest.approx(known, abs=1e-3), "the lean model is another one"
        self.faults.forbids = True
        self._first = llm
        self._roomy: dict[tuple[str, int, bool], LLM] = {}
        self._others: dict[str, Machine] = {}

    def of(self, family: str) -> Machine:
        """The same of another family."""
        if family not in self._others:
            (directory := self._directory / family).mkdir()
            self._others[family] = Machine(directory, family)
        return self._others[family]

    def engine(self, setup: Setup) -> LLM:
        facts = self._first.loaded.facts
        block_bytes = kv_format(setup.kv_format, facts.dtype).bytes_per_block(facts.layers, BLOCK_SIZE)
        state_bytes = setup.host_states * facts.state_bytes
        host_bytes = (setup.host_slots + 0.5) * block_bytes + state_bytes
        state_share = (state_bytes + block_bytes / 8) / host_bytes
        disk_bytes = setup.disk_slots * (block_bytes + 3 * 4096)
        if setup.host_states:
            of_states = 3 * (facts.state_bytes + 3 * 4096) / state_share
            disk_bytes = 2 * max(disk_bytes / (1 - state_share), of_states if setup.disk_slots else 0)
        llm = self._first.sibling(
            block_size=BLOCK_SIZE,
            num_blocks=setup.num_blocks,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            enable_prefix_caching=setup.prefix_caching,
            scheduling_policy=setup.scheduling_policy,
            eviction_policy=setup.eviction_policy,
            kernels=setup.kernels,
            kv_cache_dtype=setup.kv_format,
            kv_cache_dtype_skip_layers=("sliding_window",) if setup.plain_windows else (),
            kv_offloading_size=host_bytes / 2**30 if setup.host_slots else 0.0,
            kv_offloading_state_fraction=state_share,
            full_cache_host_size=(setup.num_blocks + 0.5) * block_bytes / 2**30 if setup.on_host else 0.0,
            preemption_mode=setup.preemption_mode,
            preemption_victim=setup.preemption_victim,
            kv_offloading_write_policy=setup.write_policy,
            prefix_snapshot_fraction=setup.prefix_snapshot_fraction,
            conversation_snapshots=setup.conversations,
            state_checkpoints=setup.state_checkpoints,
            state_checkpoint_interval=setup.state_interval,
            kv_offloading_disk_path=self._new_directory() if setup.disk_slots else None,
            kv_offloading_disk_size=disk_bytes / 2**30 or 1.0,
            kv_load_policy=setup.load_policy,
            speculative_config={**DRAFTS, "num_speculative_tokens": setup.drafts} if setup.drafts else None,
        )
        llm.engine.scheduler.in_flight.least_tokens = setup.least_shared
        if setup.broken_copies:
            for extension in llm.engine.extensions.ordered:
                if isinstance(extension, OffloadedStates):
                    extension.store = BrokenCopies(extension.store, setup.broken_copies)
        return llm

    def _new_directory(self) -> str:
        return tempfile.mkdtemp(dir=self._first.stats_file.parent)

    def question(self, ask: Ask, prompt: list[int], setup: Setup) -> Question:
        continuation = self.texts[(ask.text + 1) % len(self.texts)][: ask.max_tokens]
        scored = ask.kind == "score"
        verify = ask.verify if ask.policy is not None else 0
        at = len(prompt) - 1 - len(ask.tail) * ask.seed
        spans = tuple((start, min(end, at)) for start, end in DROPS[ask.drops] if start < at)
        return Question(
            prompt=tuple(prompt),
            continuation=tuple(continuation) if scored else (),
            kind=ask.kind,
            seed=ask.seed,
            max_tokens=1 if scored else ask.max_tokens,
            stop=() if scored or ask.kind == "beams" else ask.stop,
            salt=ask.salt,
            policy=ask.policy,
            budget=ask.budget,
            interval=ask.interval,
            chunk=setup.max_num_batched_tokens,
            kernels=setup.kernels,
            compress_prompt_at=self.compress_prompt_at(ask, prompt),
            sparse=ask.sparse,
            verify=verify,
            limits=None if ask.kind in ("beams", "score") else ask.limits,
            sinks=ask.sinks,
            drop_spans=spans,
            drop_at=at if spans else None,
        )

    def compress_prompt_at(self, ask: Ask, prompt: list[int]) -> int | None:
        """Where that can be."""
        if ask.policy in (None, "full", "oracle", "quest") or not ask.compress_prompt_at:
            return None
        return ask.compress_prompt_at if ask.compress_prompt_at < len(prompt) else None

    def compressor(self, llm: LLM, question: Question) -> Compressor | None:
        if question.policy is None:
            return None
        config = CompressionConfig(
            question.policy,
            budget=question.budget,
            interval=question.interval,
            sinks=question.sinks,
            recent=2,
            verify=question.verify > 0,
            verify_tokens=question.verify or 1,
        )
        return llm.compressor(config)

    def together(self, questions: list[Question], noise: float = 0.0) -> list[Answer]:
        """The answers of an engine in which all of them find room, and share nothing; noise: see Lean."""
        self.faults.clear()
        self.faults.noise = noise
        Brittle.armed[0] = False
        requests = [self._begin(number, question) for number, question in enumerate(questions)]
        for llm in self._roomy.values():
            while llm.engine.has_unfinished:
                llm.engine.step()
        self.faults.clear()
        for question, request in zip(questions, requests, strict=True):
            assert request.error is None, f"{question} fails alone: {request.error}"
        return [Answer.of(request) for request in requests]

    def _begin(self, number: int, question: Question) -> Request:
        key = question.kernels, question.chunk, question.sparse is not None
        if key not in self._roomy:
            setup = Setup(
                kernels=question.kernels,
                num_blocks=ROOMY * MAX_MODEL_LEN // BLOCK_SIZE,
                max_num_seqs=ROOMY if question.sparse is None else min(ROOMY, max(2, question.chunk - 8)),
                max_num_batched_tokens=question.chunk,
                prefix_caching=False,
                prefix_snapshot_fraction=0.0,
            )
            self._roomy[key] = self.engine(setup)
        llm = self._roomy[key]
        return llm.engine.add_request(
            f"question {number}",
            list(question.prompt),
            question.params(),
            self.compressor(llm, question),
            continuation=list(question.continuation) or None,
            compress_prompt_at=question.compress_prompt_at,
            cache_salt=question.salt,
            sparse_prefill=question.sparse,
            options=[] if question.beams is None else [question.beams],
            drop_spans=question.drop_spans,
            drop_at=question.drop_at,
        )


@contextmanager
def running_machine(directory: Path) -> Iterator[Machine]:
    """A machine whose odd policies are known by name while it runs."""
    with pytest.MonkeyPatch.context() as patch:
        odd_policies.register(patch)
        patch.setattr(registry, "_BUILT_IN", {**registry._BUILT_IN, Brittle.name: Brittle})
        yield Machine(directory)
