"""transformers: `generate` with its default cache and SDPA."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    StoppingCriteria,
    __version__,
)
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from kvreclaim.bench.systems.base import CHUNK, Point, Session, Slice, System, SystemSetup
from kvreclaim.model.loader import resolve_device

# The name of the cache of `generate`, which was renamed.
CACHE = "cache" if Version(__version__) >= Version("5.24") else "past_key_values"


class _Clock(StoppingCriteria):
    """Records the time of each token; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Generate(System):
    """`model.generate` with a DynamicCache, its default. Timed from the first new token to the last."""

    name = "transformers"

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

    def greedy(self, max_tokens: int) -> GenerationConfig:
        """Greedy decoding of exactly max_tokens tokens."""
        return GenerationConfig(do_sample=False, max_new_tokens=max_tokens, pad_token_id=0, use_cache=True)

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
