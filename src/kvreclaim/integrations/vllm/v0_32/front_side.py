"""The front end of vLLM 0.32: configuration, metrics, a request's own settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.settings.enabled import CENTRED, is_enabled
from kvreclaim.integrations.vllm.settings.groups import is_full, most_other_blocks
from kvreclaim.integrations.vllm.settings.max_loss import budget_text, check_cache_dtype
from kvreclaim.integrations.vllm.settings.options import KEY, Options, is_bounded
from kvreclaim.integrations.vllm.settings.patching import wrap
from kvreclaim.integrations.vllm.settings.speculation import drafts_of
from kvreclaim.integrations.vllm.v0_32 import chat_side
from kvreclaim.memory.blocks import blocks_for

OURS = "kvreclaim.integrations.vllm.entry"
FIGURES = "kvreclaim"
SCHEDULERS = {False: f"{OURS}.scheduler.ReclaimScheduler", True: f"{OURS}.scheduler.AsyncReclaimScheduler"}
VLLM_SCHEDULERS = (
    None,
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
)
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": f"{OURS}.cpu_worker.ReclaimCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": f"{OURS}.gpu_worker.ReclaimWorker",
}
CENTRING_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": f"{OURS}.cpu_worker.CentringCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": f"{OURS}.gpu_worker.CentringWorker",
}
"""Workers with centred keys and without compression."""
LABELS = ("model_name", "engine")
COUNTERS = {
    "tokens_evicted": (
        "kvreclaim_tokens_evicted",
        "Tokens evicted from the KV cache, per layer and KV head.",
    ),
    "blocks_freed": ("kvreclaim_blocks_freed", "KV cache blocks that compression gave back to the pool."),
    "compactions": ("kvreclaim_compactions", "Compressions of a request that were carried out."),
    "snapshot_tokens": (
        "kvreclaim_snapshot_tokens",
        "Prompt tokens that were not computed because a snapshot has what compression kept of them.",
    ),
    "seconds": ("kvreclaim_compression_seconds", "Time that the worker of rank 0 spent compressing."),
    "compressed": ("kvreclaim_requests_compressed", "Requests with compression that ended after a pass."),
    "whole": (
        "kvreclaim_requests_whole",
        "Requests with compression that ended without a pass: short ones, or all is kept for max_loss.",
    ),
    "promised_tokens": ("kvreclaim_promised_tokens", "Budgets of the compressed requests that ended."),
    "kept_tokens": (
        "kvreclaim_kept_tokens",
        "Tokens, per layer and KV head, that the last passes of these requests left.",
    ),
}
"""Name of a figure in Totals -> counter and its help."""


def take_over(config: Any) -> None:
    """Name our scheduler and worker, by async_scheduling. Idempotent. Raises: InvalidArgumentError."""
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls not in (*VLLM_SCHEDULERS, *SCHEDULERS.values()):
        raise InvalidArgumentError(
            f"kv_compression brings its own scheduler; got scheduler_cls = {scheduler.scheduler_cls!r}; "
            "leave --scheduler-cls out."
        )
    _take_worker(config.parallel_config, KEY, WORKERS)
    scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]


def take_over_worker(config: Any) -> None:
    """Name our worker of a configuration without compression. Idempotent. Raises: InvalidArgumentError."""
    _take_worker(config.parallel_config, CENTRED, CENTRING_WORKERS)


def _take_worker(parallel: Any, option: str, workers: Mapping[str, str]) -> None:
    if parallel.worker_cls not in (*workers, *workers.values()):
        raise InvalidArgumentError(
            f"{option} runs in the workers {', '.join(workers)}; got worker_cls = "
            f"{parallel.worker_cls!r}; leave --worker-cls out, or use a CPU or a CUDA build of vLLM."
        )
    parallel.worker_cls = workers.get(parallel.worker_cls, parallel.worker_cls)


def describe(config: Any) -> str:
    """One line for the log of a configuration that was taken over."""
    import vllm

    options = Options.of_config(config)
    settings = options.settings
    parts = [
        f"{settings.policy}, {budget_text(settings)}, interval {settings.interval} tokens",
        "unequal heads" if options.has_cells else "equal heads",
        f"statistics {options.stats}" if options.stats else "no statistics",
        "requests that ask for it" if options.opt_in else "all requests",
        *(["snapshots"] if options.snapshots else []),
        config.scheduler_config.scheduler_cls.rpartition(".")[2],
        config.parallel_config.worker_cls.rpartition(".")[2],
    ]
    return f"kvreclaim {version('kvreclaim')} in vLLM {vllm.__version__}: {'; '.join(parts)}"


def capped_bytes(
    needed: int, vllm_config: Any, kv_cache_groups: Any, bytes_per_block: Callable[[], int]
) -> int:
    """Bytes that one request of max_model_len holds at most: needed, or its budget, interval, one chunk and
    drafts.

    Unchanged where prompts are kept whole and for groups that are refused later.
    """
    full = [group.kv_cache_spec for group in kv_cache_groups if is_full(group.kv_cache_spec)]
    if len(full) != 1:
        return needed
    block_size, longest = full[0].block_size, vllm_config.model_config.max_model_len
    scheduler = vllm_config.scheduler_config
    tokens = Options.of_config(vllm_config).bound(block_size, scheduler.max_num_batched_tokens)
    if tokens is None:
        return needed
    tokens = min(longest, tokens + drafts_of(vllm_config).most)
    spared = blocks_for(longest, block_size) - blocks_for(tokens, block_size)
    return needed - spared * int(bytes_per_block())


def install_front_end() -> None:
    """Wrap what a front end with compression needs. Idempotent; other configurations see no change."""
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.metrics.loggers import StatLoggerManager

    chat_side.install()
    wrap(StatLoggerManager, "__init__", _counting)
    wrap(InputProcessor, "process_inputs", _checking)


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """StatLoggerManager.__init__: our logger first, so that others do not see the field that we borrow."""

    def __init__(
        self: Any,
        vllm_config: Any,
        engine_idxs: Any = None,
        custom_stat_loggers: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if is_enabled(vllm_config.additional_config, {}):
            custom_stat_loggers = [make_stat_logger(), *(custom_stat_loggers or ())]
        original(self, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs)

    return __init__


def make_stat_logger() -> type:
    """A class for vLLM's list of loggers; made here because others need not load the module of its base."""
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    class ReclaimStatLogger(AggregateStatLoggerBase):
        """Takes our figures out of the statistics of a step and counts them."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
            self.counters = Counters(vllm_config.model_config.served_model_name, engine_indexes)

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            figures = scheduler_stats.kv_connector_stats if scheduler_stats is not None else None
            if figures and FIGURES in figures:
                # The loggers behind us take what is in this field for a connector's statistics.
                rest = {name: value for name, value in figures.items() if name != FIGURES}
                scheduler_stats.kv_connector_stats = rest or None
                self.counters.add(figures[FIGURES], engine_idx)

        def log_engine_initialized(self) -> None:
            """Log nothing: the configuration was logged when it was made."""

    return ReclaimStatLogger


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    """InputProcessor.process_inputs: wrong settings are an error of this request, not of the engine."""

    def process_inputs(self: Any, request_id: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, request_id, prompt, *args, **kwargs)
        if is_enabled(self.vllm_config.additional_config, {}):
            check_request(request, self.vllm_config, prompt)
        return request

    return process_inputs


def check_request(request: Any, vllm_config: Any, prompt: object = None) -> None:
    """Check its settings, and let them protect the system prompt of a prompt that a chat was rendered to.

    Raises: VLLMValidationError, HTTP 400, for settings that are wrong or too large for the pool.
    """
    from vllm.exceptions import VLLMValidationError

    if request.sampling_params is None:
        return
    extra_args = request.sampling_params.extra_args
    try:
        options = Options.of_config(vllm_config)
        settings = options.of_request(extra_args)
        if settings is not None and not request.resumable:
            block_size = vllm_config.cache_config.block_size
            settings = chat_side.protected(request.sampling_params, settings, prompt, block_size)
        if settings is not None and settings.is_of_prompt:
            check_cache_dtype(settings, vllm_config)
            settings = options.of_prompt(settings, _num_prompt(request), vllm_config.cache_config.block_size)
        if settings is not None and request.resumable and KEY in (extra_args or {}):
            raise InvalidArgumentError(
                f"{KEY} is given for a session of streaming input, which is never compressed; "
                f"send its whole prompt at once, or {KEY} = 'off'."
            )
        if settings is None or not is_bounded(settings) or request.resumable:
            _check_length(request, vllm_config)
    except InvalidArgumentError as error:
        raise VLLMValidationError(str(error), parameter=KEY) from None


def _check_length(request: Any, vllm_config: Any) -> None:
    """Refuse a request that keeps all its tokens and does not fit the pool. It would preempt itself for ever,
    at the head of the queue. A session of streaming input may grow to max_model_len.

    Raises: InvalidArgumentError.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if not cache.num_gpu_blocks:
        return
    engines = (
        parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size
    )
    spare = 1 + most_other_blocks(vllm_config)
    room = (cache.num_gpu_blocks // engines - spare) * cache.block_size
    longest = vllm_config.model_config.max_model_len
    if request.resumable and longest > room:
        raise InvalidArgumentError(
            f"a session of streaming input keeps all its tokens, up to max_model_len {longest}, and the KV "
            f"cache holds {room}; send its whole prompt at once, or start the server with a --max-model-len "
            "that fits."
        )
    prompt = _num_prompt(request)
    most = prompt + request.sampling_params.max_tokens + drafts_of(vllm_config).most
    if min(most, longest) > room:
        raise InvalidArgumentError(
            f"this request keeps all its tokens, {prompt} of the prompt and up to "
            f"{request.sampling_params.max_tokens} of output, and the KV cache holds {room}; "
            f"lower max_tokens, or let it be compressed ({KEY} = 'on')."
        )


def _num_prompt(request: Any) -> int:
    ids = request.prompt_token_ids
    return len(ids) if ids is not None else int(request.prompt_embeds.shape[0])


class Counters:
    """One counter per figure of Totals, with a label for each engine; a second instance counts on.

    Args:
        engines: indexes; each is on the page with 0 from the start
    """

    def __init__(
        self, model_name: str, engines: Iterable[int], registry: CollectorRegistry = REGISTRY
    ) -> None:
        self.model_name = model_name
        self.counters = {figure: _counter(*COUNTERS[figure], registry) for figure in COUNTERS}
        for engine in engines:
            self.add({}, engine)

    def add(self, figures: Mapping[str, float], engine: int) -> None:
        """Add the figures since the last call, by the names of Totals."""
        for figure, counter in self.counters.items():
            counter.labels(self.model_name, str(engine)).inc(figures.get(figure, 0))


def _counter(name: str, text: str, registry: CollectorRegistry) -> Counter:
    existing = registry._names_to_collectors.get(name)
    return existing if isinstance(existing, Counter) else Counter(name, text, LABELS, registry=registry)
