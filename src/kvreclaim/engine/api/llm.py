"""The Python API: LLM.generate, stream, chat and score."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor
from tqdm.auto import tqdm

from kvreclaim.beams import BeamSearchParams
from kvreclaim.checks import require
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.config import EngineConfig
from kvreclaim.engine.api.chat import Message, render_chat
from kvreclaim.engine.api.compressors import Compressors
from kvreclaim.engine.api.prompts import Prompt, as_list, request_of
from kvreclaim.engine.offload.session import SessionInfo
from kvreclaim.engine.offload.stats import TierStats
from kvreclaim.engine.request.outputs import EngineTotals, RequestOutput, ScoreOutput, StepStats
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.sizing import choose_limits
from kvreclaim.engine.speculative.load import DraftModel, load_draft
from kvreclaim.engine.step.engine import Engine
from kvreclaim.errors import InvalidArgumentError, KVReclaimError
from kvreclaim.memory.prefix.tree import PrefixNode, prefix_tree
from kvreclaim.memory.stats import MemoryStats
from kvreclaim.model.loader import LoadedModel, Tokenizer, load_model
from kvreclaim.model_paths import statistics_beside
from kvreclaim.sampling_params import SamplingParams

OnStep = Callable[[StepStats], None]
Observer = Callable[[int, Tensor], None]
T = TypeVar("T")


OF_THE_WEIGHTS = ("quantized_activations", "hf_overrides")
"""Engine options that are settled when a model is loaded."""


@dataclass(frozen=True, slots=True)
class LLMStats:
    """An engine's state at a moment, and its counters since the start.

    memory:  blocks of the pool; offload: host and disk, None without
    """

    num_running: int
    num_waiting: int
    memory: MemoryStats
    totals: EngineTotals
    offload: TierStats | None


class LLM:
    """A model, its paged cache and its requests, in one process. As a context manager it closes at the end.

    Args:
        model:        a local directory, a hub id or a .gguf file; weights of AWQ, GPTQ, compressed-tensors,
                      bitsandbytes (4 bits) and GGUF stay packed: docs/quantized.md
        dtype:        "auto", "float32", "bfloat16", "float16"
        device:       "auto", "cpu", "cuda"
        compression:  of requests that bring none of their own; None keeps every token
        engine_options: the fields of EngineConfig; num_blocks and max_model_len are chosen from the model
                      and the free memory where they are None; a max_model_len that the pool cannot hold of
                      one sequence under `compression` is refused

    Raises: UnsupportedModelError, InvalidArgumentError, StatsMismatchError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        device: str = "auto",
        compression: CompressionConfig | None = None,
        **engine_options: Any,
    ) -> None:
        config = EngineConfig.from_options(engine_options)
        loaded = load_model(
            model,
            dtype=dtype,
            device=device,
            kernels=config.kernels,
            quantized_activations=config.quantized_activations,
            hf_overrides=json.loads(config.hf_overrides or "{}"),
        )
        self._start(loaded, statistics_beside(model), config, compression)

    def _start(
        self,
        loaded: LoadedModel,
        stats_file: Path,
        config: EngineConfig,
        compression: CompressionConfig | None,
        draft: DraftModel | None = None,
    ) -> None:
        """draft: of another engine, whose weights may serve this one, too"""
        self.loaded, self.stats_file, self._asked = loaded, stats_file, config
        self.draft = load_draft(config, loaded, draft)
        spoken_for = 0 if self.draft is None else self.draft.kv_bytes
        self.engine = Engine(loaded, choose_limits(config, loaded.facts, spoken_for), self.draft)
        select_top, kv_format = self.engine.backend.select_top, self.engine.kv_format
        block_size = self.engine.config.block_size
        self.compressors = Compressors(
            self.engine.groups.facts, stats_file, select_top, kv_format, block_size
        )
        self._ids = itertools.count()
        self.compression = None if compression is None else self.resolved(compression)
        own = None if self.compression is None else self.compressor(self.compression)
        self.engine.bound(own, config.max_model_len)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def stats(self) -> LLMStats:
        """Requests, blocks, offload and counters: a copy, of this moment."""
        engine = self.engine
        running, waiting = len(engine.scheduler.running), len(engine.scheduler.waiting)
        return LLMStats(running, waiting, engine.memory.stats(), deepcopy(engine.totals), engine.tier_stats())

    def sibling(self, **changes: Any) -> LLM:
        """Another engine over the same weights, a draft model's included, with a pool of its own until
        nothing refers to it.

        changes: engine options that differ from what this one was asked for; what was left open is chosen
                 anew, from the memory that is free now

        Raises: InvalidArgumentError.
        """
        options = {field.name: getattr(self._asked, field.name) for field in fields(EngineConfig)}
        config = EngineConfig.from_options(options | changes)
        for name in OF_THE_WEIGHTS:
            if getattr(config, name) != options[name]:
                raise InvalidArgumentError(
                    f"{name} is {getattr(config, name)!r}, and the weights were loaded with "
                    f"{options[name]!r}; make another LLM."
                )
        other = LLM.__new__(LLM)
        other._start(self.loaded, self.stats_file, config, self.compression, self.draft)
        return other

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises: InvalidArgumentError where it has none."""
        if self.loaded.tokenizer is None:
            raise InvalidArgumentError(
                f"{self.loaded.facts.name} has no tokenizer; pass prompts as token ids."
            )
        return self.loaded.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig | None] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt; outputs come in the order of the prompts.

        Args:
            prompts:         text, token ids, pieces some of which are chunks, or a mapping with one of these
                             and options of the prompt: {"prompt": text, "cache_salt": salt}; one or several.
                             docs/api.md lists the options
            sampling_params: one, or one per prompt
            compression:     one, or one per prompt; None takes the LLM's own
            priority:        one, or one per prompt; under scheduling_policy "priority" a lower one is first
            on_step:         called with each step's figures

        Raises: InvalidArgumentError, RequestTooLongError before anything has run, naming the prompt.
        A request that fails while it runs ends with finish_reason "error" and does not raise.
        """
        batch = as_list(prompts)
        given = SamplingParams() if sampling_params is None else sampling_params
        params = _one_each(given, len(batch), "sampling_params")
        configs = _one_each(compression, len(batch), "compression")
        ranks = _one_each(priority, len(batch), "priority")
        requests = self._add_all(prompt=batch, params=params, compression=configs, priority=ranks)
        self._run(requests, use_tqdm, on_step)
        return [request.output() for request in requests]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig | None] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """The likeliest outputs of each prompt, as transformers' generate(num_beams=...) finds them; of each
        the best num_return_sequences, with cumulative_logprob and sequences_scores.

        Beams share the blocks of what they have in common. Arguments as `generate` has them.

        Raises: InvalidArgumentError, RequestTooLongError before anything has run, naming the prompt.
        """
        batch = as_list(prompts)
        given = BeamSearchParams() if params is None else params
        beams = _one_each(given, len(batch), "params")
        for each in beams:
            _check_type(each, BeamSearchParams, "params")
        configs = _one_each(compression, len(batch), "compression")
        ranks = _one_each(priority, len(batch), "priority")
        sampling = [each.sampling for each in beams]
        requests = self._add_all(
            prompt=batch, params=sampling, compression=configs, priority=ranks, beams=beams
        )
        self._run(requests, use_tqdm, on_step)
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig | None] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
        on_step: OnStep | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Generate the assistant's next turn of a conversation, or of each of several, through the
        tokenizer's chat template. Other arguments as `generate` has them, one or one per conversation.

        template: keyword arguments of render_chat (tools, chat_template, ...), for all conversations
        """
        several = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], (list, tuple))
        conversations: Sequence[Any] = messages if several else [messages]
        return self.generate(
            [render_chat(self.loaded, each, **template) for each in conversations],
            sampling_params,
            compression,
            priority=priority,
            use_tqdm=use_tqdm,
            on_step=on_step,
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        compression: CompressionConfig | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """Yield the request's outputs so far after each token; closing the iterator aborts it. Arguments as
        `generate` has them."""
        params = SamplingParams() if sampling_params is None else sampling_params
        request = self._add(prompt, params, compression, priority=priority)
        seen = 0
        try:
            while not request.finished:
                self.engine.step()
                num_tokens = sum(seq.num_generated for seq in request.sequences)
                if num_tokens > seen and not request.finished:
                    seen = num_tokens
                    yield request.output()
            yield request.output()
        finally:
            if not request.finished:
                self.engine.abort(request.request_id)

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[list[int]],
        compression: CompressionConfig | Sequence[CompressionConfig | None] | None = None,
        *,
        use_tqdm: bool = False,
        observers: Sequence[Observer | None] | None = None,
    ) -> list[ScoreOutput]:
        """Score given continuations by teacher forcing: what the model would have said at each place.

        The cache is compressed at exactly the points at which generating the continuation would have
        compressed it; between two of them the tokens are computed in one go.

        observers: one per prompt or None, told the whole log-probability rows as they come (see Scores);
                   nothing of them is kept here
        """
        if len(prompts) != len(continuations):
            raise InvalidArgumentError(
                f"{len(prompts)} prompts but {len(continuations)} continuations; pass one for each."
            )
        if not all(continuations):
            raise InvalidArgumentError("a continuation is empty; pass at least one token to score.")
        configs = _one_each(compression, len(prompts), "compression")
        params = [SamplingParams(temperature=0.0, max_tokens=1)] * len(prompts)
        watching: list[Observer | None] = _one_each(observers, len(prompts), "observers")
        requests = self._add_all(
            prompt=prompts, params=params, compression=configs, continuation=continuations
        )
        for request, observer in zip(requests, watching, strict=True):
            if request.scores is not None:
                request.scores.observer = observer
        self._run(requests, use_tqdm, None)
        return [request.score_output() for request in requests]

    def abort(self, request_id: str) -> None:
        """End a request and return its blocks. Raises: UnknownRequestError."""
        self.engine.abort(request_id)

    def prefix_tree(self) -> tuple[PrefixNode, ...]:
        """What prompts are found to begin with, as radix trees, those of different salts apart: tokens,
        blocks, and which running requests hold them. A copy, of this moment; O(cached blocks).
        `node.lines()` draws it.

        Compressed prefixes (compress_prompt_at) and what only lies on the host or on disk are not in it.
        """
        return prefix_tree(self.engine.memory.pool.index, self.engine.block_holders())

    def save_session(
        self,
        prompt: Prompt,
        path: str | os.PathLike[str],
        *,
        compression: CompressionConfig | None = None,
    ) -> SessionInfo:
        """Write what is cached of a prompt to a file: its leading full blocks, wherever they lie. Of a prompt
        with its answer: output.prompt_token_ids + output.outputs[0].token_ids.

        prompt:      with compress_prompt_at: instead, what compression has left of so many leading tokens
        compression: of such a prompt, as it was when the prompt was computed; None for the engine's own

        Raises: InvalidArgumentError if nothing is, OSError.
        """
        spec = request_of(prompt, self._encode, params=SamplingParams())
        tokens, salt, config = spec.prompt_token_ids, spec.cache_salt, compression or self.compression
        if spec.compress_prompt_at is None:
            require(
                compression is None,
                "compression is given without compress_prompt_at: only what is compressed at a place of the "
                "prompt can be saved; say where, or leave compression out.",
                "compress_prompt_at",
            )
            return self.engine.sessions.save(tokens, path, salt)
        compressor = None if config is None else self.compressor(config)
        return self.engine.sessions.save_compressed(tokens, path, salt, compressor, spec.compress_prompt_at)

    def load_session(self, path: str | os.PathLike[str], *, cache_salt: str | None = None) -> SessionInfo:
        """Read such a file: prompts that begin so, and have this salt, are found in the cache from now on. Of
        a compressed one: those that ask for the same compression at the same place.

        Raises: InvalidArgumentError for a file that is damaged, or of another model, KV format or block size,
            which it names, or if there is no room for it; OSError.
        """
        return self.engine.sessions.load(path, cache_salt)

    def close(self) -> None:
        """Let go of what the engine holds beside memory: what is on its way to disk is written, its file
        closed. Without a disk tier there is nothing to do; at the latest it happens when the process ends."""
        self.engine.close()

    def _add_all(self, **columns: Sequence[Any]) -> list[Request]:
        """Queue all or none; columns: the arguments of _add, one of each for each request."""
        requests: list[Request] = []
        items = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        try:
            for item in items:
                requests.append(self._add(**item))  # noqa: PERF401  (the handler needs what was added)
        except KVReclaimError as error:
            for request in requests:
                self.engine.abort(request.request_id)
            if len(items) > 1:
                error.args = (f"prompt {len(requests)}: {error}",)
            raise
        return requests

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        compression: CompressionConfig | None,
        **asked: Any,
    ) -> Request:
        """asked: RequestSpec's other fields"""
        _check_type(params, SamplingParams, "sampling_params")
        config = compression if compression is not None else self.compression
        compressor = self.compressor(config) if config is not None else None
        request_id = f"request-{next(self._ids)}"
        spec = request_of(
            prompt, self._encode, request_id=request_id, params=params, compression=config, **asked
        )
        return self.engine.add(spec, compressor)

    def _encode(self, text: str, begins: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=begins))

    def resolved(self, config: CompressionConfig) -> CompressionConfig:
        """The config with the policy that this model's statistics name where it says "auto"."""
        _check_type(config, CompressionConfig, "compression")
        return self.compressors.resolved(config)

    def compressor(self, config: CompressionConfig) -> Compressor:
        """The config bound to this model, with the statistics beside the weights if it names none."""
        _check_type(config, CompressionConfig, "compression")
        return self.compressors.of(config)

    def _run(self, requests: list[Request], use_tqdm: bool, on_step: OnStep | None) -> None:
        bar = tqdm(total=len(requests), desc="requests", disable=not use_tqdm)
        try:
            while pending := sum(not request.finished for request in requests):
                result = self.engine.step()
                bar.update(pending - sum(not request.finished for request in requests))
                if on_step is not None:
                    on_step(result.stats)
        finally:
            bar.close()
            for request in requests:
                if not request.finished:
                    self.engine.abort(request.request_id)


def _check_type(value: Any, allowed: type, name: str) -> None:
    if not isinstance(value, allowed):
        raise InvalidArgumentError(
            f"{name} is a {type(value).__name__} ({str(value)[:40]}); pass {allowed.__name__}(...).",
            field=name,
        )


def _one_each(value: T | Sequence[T], count: int, name: str) -> list[T]:
    if not isinstance(value, (list, tuple)):
        return [value] * count  # type: ignore[list-item]
    if len(value) != count:
        raise InvalidArgumentError(
            f"{name} has {len(value)} entries for {count} prompts; pass one, or one each.",
            field=name,
        )
    return list(value)
