"""The Python API: LLM.generate, stream, chat and score."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor
from tqdm.auto import tqdm

from kvreclaim.beams import BeamSearchParams
from kvreclaim.checks import check_int, require
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression_settings import FULL
from kvreclaim.config import EngineConfig
from kvreclaim.engine.api.chat import Message, num_system_tokens, render_chat
from kvreclaim.engine.api.compressors import Compressors
from kvreclaim.engine.api.kept_statistics import kept_statistics
from kvreclaim.engine.api.prompts import Prompt, as_list, request_of
from kvreclaim.engine.api.thinking import span_by_template
from kvreclaim.engine.offload.session import SessionInfo
from kvreclaim.engine.offload.stats import TierStats
from kvreclaim.engine.request.outputs import EngineTotals, RequestOutput, ScoreOutput, StepStats
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.sizing import choose_limits
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.speculative.load import DraftModel, load_draft
from kvreclaim.engine.step.engine import Engine
from kvreclaim.errors import InvalidArgumentError, KVReclaimError
from kvreclaim.memory.prefix.tree import PrefixNode, prefix_tree
from kvreclaim.memory.stats import MemoryStats
from kvreclaim.model.loader import LoadedModel, Tokenizer, load_model
from kvreclaim.model_paths import statistics_beside
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.structured_outputs import StructuredOutputsParams

OnStep = Callable[[StepStats], None]
Observer = Callable[[int, Tensor], None]
T = TypeVar("T")


OF_THE_WEIGHTS = ("quantized_activations", "hf_overrides", "cache_packed_weights", "threads")
"""Engine options that are fixed when a model is loaded."""
FOR_CALIBRATION: dict[str, Any] = {
    "num_blocks": 1,
    "max_model_len": 1,
    "disable_hybrid_kv_cache_manager": True,
}
"""Options of an engine that only measures its model."""


@dataclass(frozen=True, slots=True)
class LLMStats:
    """An engine's state now, and its counters since the start.

    memory:  blocks of the pool
    offload: host and disk; None without offloading
    """

    num_running: int
    num_waiting: int
    memory: MemoryStats
    totals: EngineTotals
    offload: TierStats | None


class LLM:
    """A model, its paged KV cache and its requests, in one process; a context manager that closes it.

    Args:
        model:        a local directory, a hub id or a .gguf file; weights of AWQ, GPTQ, compressed-tensors,
                      bitsandbytes (4 bits) and GGUF stay packed: docs/quantized.md
        dtype:        "auto", "float32", "bfloat16", "float16"
        device:       "auto", "cpu", "cuda"
        compression:  of requests without their own; None keeps every token
        calibrate:    writes stats_file, such as calibrate.statistics.calibrate_at_start; called at the start,
                      with an LLM of this model, if there is no such file and `compression` names none
        engine_options: fields of EngineConfig. A max_model_len is refused if the pool cannot hold one
                      sequence of that length under `compression`

    Raises: UnsupportedModelError, InvalidArgumentError, StatsMismatchError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        device: str = "auto",
        compression: CompressionConfig | None = None,
        calibrate: Callable[[LLM], object] | None = None,
        **engine_options: Any,
    ) -> None:
        config = EngineConfig.from_options(engine_options)
        if config.threads is not None:
            from kvreclaim.ops.threads import use_threads

            use_threads(config.threads)
        loaded = load_model(
            model,
            dtype=dtype,
            device=device,
            kernels=config.kernels,
            quantized_activations=config.quantized_activations,
            hf_overrides=json.loads(config.hf_overrides or "{}"),
            cache_packed_weights=config.cache_packed_weights,
        )
        beside = statistics_beside(model)
        stats_file = beside if beside.is_file() else kept_statistics(loaded)
        is_named = getattr(compression, "stats", None) is not None
        if calibrate is not None and not (is_named or stats_file.is_file()):
            self._start(loaded, stats_file, _measuring(config), None)
            calibrate(self)
        self._start(loaded, stats_file, config, compression)

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
        spoken_for = loaded.mapped_bytes
        if self.draft is not None:
            spoken_for += self.draft.kv_bytes + self.draft.loaded.mapped_bytes
        self.engine = Engine(loaded, choose_limits(config, loaded.facts, spoken_for), self.draft)
        select_top, kv_format = self.engine.backend.select_top, self.engine.kv_format
        block_size = self.engine.config.block_size
        self.compressors = Compressors(
            self.engine.groups.facts, stats_file, select_top, kv_format, block_size
        )
        self._ids = itertools.count()
        self._making_grammars = threading.Lock()
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
        """A copy of the present figures: requests, blocks, offload and counters."""
        engine = self.engine
        running, waiting = len(engine.scheduler.running), len(engine.scheduler.waiting)
        return LLMStats(running, waiting, engine.memory.stats(), deepcopy(engine.totals), engine.tier_stats())

    def sibling(self, **changes: Any) -> LLM:
        """A second engine on the same weights (and draft model's weights), with a pool of its own.

        changes: engine options that differ from this engine's. Options that were left to the engine are
                 chosen again, from the memory that is free now

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
        """The model's tokenizer. Raises: InvalidArgumentError if it has none."""
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
            prompts:         one or several; each is text, token ids, a list of pieces with chunks, or a
                             mapping with one of these and options of the prompt: {"prompt": text,
                             "cache_salt": salt} (docs/api.md lists them)
            sampling_params: one, or one per prompt
            compression:     one, or one per prompt; None takes the LLM's own
            priority:        one, or one per prompt; lower runs first, under scheduling_policy "priority"
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
        """Find the likeliest outputs of each prompt, like transformers' generate(num_beams=...). Returns the
        best num_return_sequences of each, with cumulative_logprob and sequences_scores.

        Beams share the blocks of their common tokens. Other arguments are those of `generate`.

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
        """Generate the assistant's next turn of one or several conversations, with the tokenizer's chat
        template. Other arguments are those of `generate`, one or one per conversation.

        With compression, system prompt and tools stay (CompressionConfig.protect_system).

        template: keyword arguments of render_chat (tools, chat_template, ...), for all conversations
        """
        several = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], (list, tuple))
        conversations: Sequence[Any] = messages if several else [messages]
        prompts = [render_chat(self.loaded, each, **template) for each in conversations]
        configs = _one_each(compression, len(prompts), "compression")
        every = zip(configs, prompts, conversations, strict=True)
        return self.generate(
            prompts,
            sampling_params,
            [self._for_chat(*each, template) for each in every],
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
        """Yield the request's outputs so far after each token; closing the iterator aborts it. Arguments are
        those of `generate`."""
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
        """Score given continuations by teacher forcing: the model's prediction at each token.

        The cache is compressed at exactly the points at which generation would compress it; the tokens
        between two of them are computed together.

        observers: one per prompt, or None; each is called with whole rows of log-probabilities (see Scores)
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
        """The prefix index as one radix tree per salt: tokens, blocks, and the running requests that hold
        them. A copy; O(cached blocks). `node.lines()` draws it.

        Compressed prefixes (compress_prompt_at) and blocks that are only on host or disk are not in it.
        """
        return prefix_tree(self.engine.memory.pool.index, self.engine.block_holders())

    def save_session(
        self,
        prompt: Prompt,
        path: str | os.PathLike[str],
        *,
        compression: CompressionConfig | None = None,
    ) -> SessionInfo:
        """Write the cached leading full blocks of a prompt to a file, from the pool, host or disk. To include
        the answer, pass output.prompt_token_ids + output.outputs[0].token_ids.

        prompt:      with compress_prompt_at n: the compressed prefix of the first n tokens instead
        compression: of such a prefix, as when it was computed; None for the engine's own

        Raises: InvalidArgumentError if nothing is cached, OSError.
        """
        spec = self.promised(
            request_of(prompt, self._encode, params=SamplingParams(), compression=compression)
        )
        tokens, salt, config = spec.prompt_token_ids, spec.cache_salt, spec.compression
        if spec.compress_prompt_at is None:
            require(
                compression is None,
                "compression is given without compress_prompt_at, and only a prefix compressed there can be "
                "saved; pass compress_prompt_at, or leave compression out.",
                "compress_prompt_at",
            )
            return self.engine.sessions.save(tokens, path, salt)
        compressor = None if config is None else self.compressor(config)
        return self.engine.sessions.save_compressed(tokens, path, salt, compressor, spec.compress_prompt_at)

    def load_session(self, path: str | os.PathLike[str], *, cache_salt: str | None = None) -> SessionInfo:
        """Read a file of save_session into the prefix cache: prompts with this beginning and salt hit it. A
        compressed prefix serves prompts with the same compression and compress_prompt_at.

        Raises: InvalidArgumentError if the file is damaged, there is no room, or model, KV format or block
            size differ (it names them); OSError.
        """
        return self.engine.sessions.load(path, cache_salt)

    def close(self) -> None:
        """Wait for pending writes to disk and close the file; it also happens when the process ends. Without
        a disk tier it does nothing."""
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
        if config is not None:
            _check_type(config, CompressionConfig, "compression")
        request_id = f"request-{next(self._ids)}"
        spec = self.promised(
            request_of(
                prompt, self._encode, request_id=request_id, params=params, compression=config, **asked
            )
        )
        if params.thinking_token_budget is not None:
            spec = replace(spec, thinking=span_by_template(self.loaded.tokenizer, spec.prompt_token_ids))
        compressor = None if spec.compression is None else self.compressor(spec.compression)
        return self.engine.add(spec, compressor)

    def _for_chat(
        self,
        config: CompressionConfig | None,
        prompt: list[int],
        messages: Sequence[Message],
        template: dict[str, Any],
    ) -> CompressionConfig | None:
        """The compression of a conversation, whose system prompt and tools it protects."""
        config = self.compression if config is None else config
        if not isinstance(config, CompressionConfig) or not config.protect_system:
            return config
        num_system = num_system_tokens(self.loaded, prompt, messages, **template)
        return config.protecting(num_system, self.engine.config.block_size)

    def _encode(self, text: str, begins: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=begins))

    def resolved(self, config: CompressionConfig) -> CompressionConfig:
        """The config with "auto" replaced by the policy that this model's statistics name."""
        _check_type(config, CompressionConfig, "compression")
        return self.compressors.resolved(config)

    def promised(self, spec: RequestSpec) -> RequestSpec:
        """The request with its compression, or else this LLM's, at the budget that max_loss promises for its
        prompt, or for what is compressed of it. Where everything must stay, compress_prompt_at has no use."""
        config, at = spec.compression or self.compression, spec.compress_prompt_at
        if config is None or config.max_loss is None:
            return spec if spec.compression is config else replace(spec, compression=config)
        if at is not None:
            check_int("compress_prompt_at", at, 1)
        config = self.compressors.promised(config, len(spec.prompt_token_ids) if at is None else at)
        return replace(spec, compression=config, compress_prompt_at=None if config.policy == FULL else at)

    def compressor(self, config: CompressionConfig) -> Compressor:
        """A compressor for this model; reads the model's statistics if the config names none."""
        _check_type(config, CompressionConfig, "compression")
        return self.compressors.of(config)

    def make_grammar(self, params: StructuredOutputsParams) -> None:
        """Make a grammar that requests will need, if there is none; from any thread, so that no step waits.

        Raises: InvalidArgumentError.
        """
        with self._making_grammars:  # the first one reads the vocabulary
            grammars = self.engine.grammars
        grammars.matcher(params)

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


def _measuring(config: EngineConfig) -> EngineConfig:
    """Settings of an engine that measures a model that was loaded with these."""
    return EngineConfig(
        **FOR_CALIBRATION, kernels=config.kernels, **{name: getattr(config, name) for name in OF_THE_WEIGHTS}
    )


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
