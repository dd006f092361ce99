"""transformers: `generate` with its default cache and SDPA, and its continuous batching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic, perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StoppingCriteria,
    __version__,
)
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from kvreclaim.bench.systems.base import CHUNK, Point, Session, SkipPoint, Slice, System, SystemSetup
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model.loader import resolve_device

REQUEST_TIMEOUT_S = 600.0
# Parameter names of the cache of `generate` and of continuous batching, which were renamed.
CACHE = "cache" if Version(__version__) >= Version("5.24") else "past_key_values"
PAGE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"


class _Transformers(System):
    """Base of both ways of generating: the model with SDPA attention."""

    def __init__(self, setup: SystemSetup) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=getattr(torch, setup.dtype), attn_implementation="sdpa"
        )
        self.model = model.eval().to(resolve_device("auto"))  # on kvreclaim's device
        self.vocab_size = int(self.model.config.vocab_size)
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = DynamicCache(config=config).layers or [DynamicLayer()] * config.num_hidden_layers
        self.attends = [isinstance(layer, DynamicLayer) for layer in layers]
        self.kv_shape = (sum(self.attends), config.num_key_value_heads, head_dim)

    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        layers, heads, dim = self.kv_shape
        return 2 * layers * heads * dim * self.model.dtype.itemsize

    def greedy(self, max_tokens: int, no_end: int | None = None) -> GenerationConfig:
        """Greedy decoding of exactly max_tokens tokens; no_end is the value for "no end token"."""
        return GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=no_end, pad_token_id=0, use_cache=True
        )


class _Clock(StoppingCriteria):
    """Records the time of each token; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Generate(_Transformers):
    """`model.generate` with a DynamicCache, its default. Timed from the first new token to the last."""

    name = "transformers"

    def new_bytes(self, point: Point) -> int:
        layers = self.kv_shape[0]
        return int(point.batch * point.max_len * self.token_bytes() * (1 + 5 / layers))

    def open(self, point: Point) -> GenerateSession:
        return GenerateSession(self, point)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        outputs = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self.model.device)
            made = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=self.greedy(max_tokens)
            )
            outputs.append(made[0, len(prompt) :].tolist())
        return outputs


class GenerateSession(Session):
    """A cache that is cut back to the context after every slice, including recurrent states."""

    def __init__(self, system: Generate, point: Point) -> None:
        self.system, self.point = system, point
        prompts = torch.tensor(point.prompts(system.vocab_size), device=system.model.device)
        self.ids = torch.cat([prompts, prompts[:, -1:]], dim=1)
        self.cache = DynamicCache(config=system.model.config)
        started = perf_counter()
        self._fill(prompts)
        self.fill_s = perf_counter() - started
        self.states = [state.clone() for state in self._states()]

    def _recurrent(self) -> list[LinearAttentionCacheLayerMixin]:
        return [each for each in self.cache.layers if isinstance(each, LinearAttentionCacheLayerMixin)]

    def _states(self) -> list[torch.Tensor]:
        """States of recurrent layers."""
        kinds = [kind for each in self._recurrent() for kind in (each.conv_states, each.recurrent_states)]
        return [state for kind in kinds for state in kind.values() if state is not None]

    @torch.inference_mode()
    def _fill(self, prompts: torch.Tensor) -> None:
        if self.point.fill == "prefill":
            for start in range(0, prompts.shape[1], CHUNK):
                self.system.model.model(prompts[:, start : start + CHUNK], **{CACHE: self.cache})
            return
        _, heads, dim = self.system.kv_shape
        missing = self.point.context
        if self._recurrent():  # a token initialises their states
            self.system.model.model(prompts[:, :1], **{CACHE: self.cache})
            missing -= 1
        shape = (self.point.batch, heads, missing, dim)
        for layer, attends in enumerate(self.system.attends):
            if attends:
                keys = torch.randn(shape, dtype=self.system.model.dtype, device=self.system.model.device)
                self.cache.update(keys, keys.roll(1, dims=-1), layer)

    @torch.inference_mode()
    def run(self, steps: int) -> Slice:
        clock = _Clock()
        self.system.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            **{CACHE: self.cache},
            generation_config=self.system.greedy(steps + 1),
            stopping_criteria=[clock],
        )
        surplus = self.cache.get_seq_length() - self.point.context
        layers: list[Any] = self.cache.layers
        for layer, attends in zip(layers, self.system.attends, strict=True):
            if attends:
                DynamicLayer.crop(layer, -surplus)
        for state, before in zip(self._states(), self.states, strict=True):
            state.copy_(before)
        return Slice(steps, steps * self.point.batch, clock.times[-1] - clock.times[0])

    def close(self) -> None:
        del self.cache


class ContinuousBatching(_Transformers):
    """`ContinuousBatchingManager`, timed by its own clock."""

    name = "transformers-cb"

    def new_bytes(self, point: Point) -> int:
        tokens = point.batch * point.max_len
        mask_bytes = tokens * CHUNK * self.model.dtype.itemsize  # it masks all sequences in one rectangle
        return int(1.5 * tokens * self.token_bytes()) + mask_bytes

    def open(self, point: Point) -> ContinuousSession:
        return ContinuousSession(self, point)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        with self.running(len(prompts), max(map(len, prompts)) + max_tokens) as manager:
            names = [manager.add_request(prompt, max_new_tokens=max_tokens) for prompt in prompts]
            states: dict[str, Any] = {}
            while len(states) < len(names):
                found = _next_result(manager)
                states[found.request_id] = found
        return [list(states[name].generated_tokens) for name in names]

    @contextmanager
    def running(self, batch: int, max_len: int) -> Iterator[Any]:
        """A manager whose pool holds that many sequences of that length."""
        page = 256
        sizes: Any = {PAGE: page}
        config = ContinuousBatchingConfig(
            **sizes,
            num_blocks=batch * (blocks_for(max_len, page) + 1),
            max_batch_tokens=CHUNK,
            max_requests_per_batch=batch,
            safety_margin=0.0,
        )
        manager = self.model.init_continuous_batching(
            generation_config=self.greedy(max_len, no_end=-1), continuous_batching_config=config
        )
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True, hard_stop=True)


class ContinuousSession(Session):
    """Prompts are sent anew for every slice; timing begins when all of them are filled."""

    def __init__(self, system: ContinuousBatching, point: Point) -> None:
        self.system, self.point = system, point
        self.prompts = point.prompts(system.vocab_size)
        self.fill_s = 0.0

    def run(self, steps: int) -> Slice:
        point = self.point
        while_filling = -(-(point.batch - 1) * point.context // CHUNK)
        max_tokens = while_filling + steps + 4
        filling = synthetic_prefill(self.system) if point.fill == "synthetic" else nullcontext()
        with self.system.running(point.batch, point.context + max_tokens) as manager, filling:
            times = _times(manager, self.prompts, max_tokens)
        return _common_stretch(times)

    def close(self) -> None:
        del self.prompts


def _times(manager: Any, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
    """Times of each request's tokens, until the first request ended."""
    times: dict[str, list[float]] = {}
    for prompt in prompts:
        name = manager.add_request(prompt, max_new_tokens=max_tokens, streaming=True, record_timestamps=True)
        times[name] = []
    while True:
        found = _next_result(manager)
        times[found.request_id] = list(found.timestamps)
        if found.is_finished():
            return list(times.values())


def _next_result(manager: Any) -> Any:
    """The next result of a request. Raises: SkipPoint if it failed, or none comes any more."""
    deadline = monotonic() + REQUEST_TIMEOUT_S
    while monotonic() < deadline and manager.is_running():
        found = manager.get_result(timeout=1)
        if found is not None and found.error:
            raise SkipPoint(f"transformers' continuous batching failed: {found.error}")
        if found is not None:
            return found
    raise SkipPoint("transformers' continuous batching gave no answer")


def _common_stretch(times: list[list[float]]) -> Slice:
    """The stretch in which all decode: each of its steps gives each sequence a token."""
    if not all(times):
        raise SkipPoint("a sequence got no token while the first one was decoding")
    latest = max(times, key=lambda series: series[0])
    steps = len(latest) - 1
    if steps < 1:
        raise SkipPoint("the sequences never decoded all at once")
    return Slice(steps, steps * len(times), latest[-1] - latest[0])


@contextmanager
def synthetic_prefill(system: ContinuousBatching) -> Iterator[None]:
    """Replace steps with prefill by storing random keys and values during the block."""
    model, (layers, heads, dim) = system.model, system.kv_shape
    noise = torch.randn((1, heads, CHUNK, dim), dtype=model.dtype, device=model.device)
    logits = torch.rand((1, CHUNK, system.vocab_size), dtype=model.dtype, device=model.device)
    compute = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        tokens = kwargs["input_ids"].shape[-1]
        if kwargs["max_length_q"] <= 1:
            return compute(*args, **kwargs)
        part = noise[:, :, :tokens]
        write_only = kwargs | {"read_index": [index[:0] for index in kwargs["read_index"]]}
        for layer in range(layers):
            kwargs["cache"].update(part, part, layer, dict(write_only))
        keep = kwargs.get("logits_to_keep")
        return SimpleNamespace(logits=logits[:, : tokens if keep is None else keep.numel()])

    with patch.object(model, "forward", forward):
        yield
