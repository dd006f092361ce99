"""The Python API: LLM.generate, stream, chat and score."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor
from tqdm.auto import tqdm

from kvreclaim.beams import BeamSearchParams
from kvreclaim.compression.config import CompressionConfig, StatsSource
from kvreclaim.config import EngineConfig
from kvreclaim.engine.api.chat import Message, num_system_tokens, render_chat
from kvreclaim.engine.api.kept_statistics import statistics_file
from kvreclaim.engine.api.model_engine import OF_THE_WEIGHTS, ModelEngine
from kvreclaim.engine.api.prompts import Prompt, as_list, check_type
from kvreclaim.engine.request.outputs import RequestOutput, ScoreOutput, StepStats
from kvreclaim.engine.request.request import Request
from kvreclaim.errors import InvalidArgumentError, KVReclaimError
from kvreclaim.model.loader import load_model
from kvreclaim.sampling_params import SamplingParams

OnStep = Callable[[StepStats], None]
Observer = Callable[[int, Tensor], None]
T = TypeVar("T")

FOR_CALIBRATION: dict[str, Any] = {
    "num_blocks": 1,
    "max_model_len": 1,
    "disable_hybrid_kv_cache_manager": True,
}
"""Options of an engine that only measures its model."""


class LLM(ModelEngine):
    """A model, its paged KV cache and its requests, in one process; a context manager that closes it.

    Args:
        model:        a local directory, a hub id or a .gguf file; weights of AWQ, GPTQ, compressed-tensors,
                      bitsandbytes (4 bits) and GGUF stay packed: docs/quantized.md
        dtype:        "auto", "float32", "bfloat16", "float16"
        device:       "auto", "cpu", "cuda"
        compression:  of requests without their own; None keeps every token
        stats:        statistics for the key transform of a coded cache; None: those of `compression`,
                      otherwise the model's
        calibrate:    writes stats_file, such as calibrate.statistics.calibrate_at_start; called at the start,
                      with an LLM of this model, if there is no such file and no statistics are named
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
        stats: StatsSource | None = None,
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
        stats_file = statistics_file(model, loaded)
        is_named = stats is not None or getattr(compression, "stats", None) is not None
        if calibrate is not None and not (is_named or stats_file.is_file()):
            super().__init__(loaded, stats_file, _measuring(config), None)
            calibrate(self)
        super().__init__(loaded, stats_file, config, compression, stats=stats)

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
        params = SamplingParams() if sampling_params is None else sampling_params
        requests = self._add_all(
            as_list(prompts), sampling_params=params, compression=compression, priority=priority
        )
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
        beams = _one_each("params", given, len(batch))
        for each in beams:
            check_type("params", each, BeamSearchParams)
        requests = self._add_all(
            batch,
            sampling_params=[each.sampling for each in beams],
            compression=compression,
            priority=priority,
            options=[(each,) for each in beams],
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
        configs = _one_each("compression", compression, len(prompts))
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
        request = self.add_prompt(prompt, params, compression, priority=priority)
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
        params = SamplingParams(temperature=0.0, max_tokens=1)
        watching: list[Observer | None] = _one_each("observers", observers, len(prompts))
        requests = self._add_all(
            prompts, sampling_params=params, compression=compression, continuation=list(continuations)
        )
        for request, observer in zip(requests, watching, strict=True):
            if request.scores is not None:
                request.scores.observer = observer
        self._run(requests, use_tqdm, None)
        return [request.score_output() for request in requests]

    def _add_all(self, prompts: Sequence[Prompt], **arguments: Any) -> list[Request]:
        """Queue all or none. arguments: of `add_prompt`, each for all prompts or a list of one per prompt."""
        requests: list[Request] = []
        columns = {name: _one_each(name, value, len(prompts)) for name, value in arguments.items()}
        rows = zip(prompts, *columns.values(), strict=True)
        items = [dict(zip(("prompt", *columns), row, strict=True)) for row in rows]
        try:
            for item in items:
                requests.append(self.add_prompt(**item))  # noqa: PERF401  (the handler needs what was added)
        except KVReclaimError as error:
            for request in requests:
                self.engine.abort(request.request_id)
            if len(items) > 1:
                error.args = (f"prompt {len(requests)}: {error}",)
            raise
        return requests

    def _for_chat(
        self,
        config: CompressionConfig | None,
        prompt: list[int],
        messages: Sequence[Message],
        template: dict[str, Any],
    ) -> CompressionConfig | None:
        """Return a conversation's compression. It protects the system prompt and tools."""
        config = self.compression if config is None else config
        if not isinstance(config, CompressionConfig) or not config.protect_system:
            return config
        num_system = num_system_tokens(self.loaded, prompt, messages, **template)
        return config.protecting(num_system, self.engine.config.block_size)

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
    own = {name: getattr(config, name) for name in ("kernels", *OF_THE_WEIGHTS)}
    return EngineConfig(**FOR_CALIBRATION, **own)


def _one_each(name: str, value: T | Sequence[T], count: int) -> list[T]:
    if not isinstance(value, (list, tuple)):
        return [value] * count  # type: ignore[list-item]
    if len(value) != count:
        raise InvalidArgumentError(
            f"{name} has {len(value)} entries for {count} prompts; pass one, or one each.",
            field=name,
        )
    return list(value)
