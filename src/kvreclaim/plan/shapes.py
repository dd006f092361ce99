"""Sizes of a model's keys, values and weights: all that memory and time depend on.

Words: *linear* weights are those of matrices that a checkpoint in few bits stores so; *plain* ones (norms,
biases, routers, sinks) stay in the model's dtype, as do embedding and head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.kv_bytes import KVBytes
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.windows import ChunkedWindow, Window

STATE_BITS = 32
"""Bits of a number that a recurrent layer sums up, whatever the model's dtype."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer: how many, how many a token visits, weights and biases of one."""

    count: int
    per_token: int
    linear: int
    plain: int = 0

    def touched(self, num_tokens: int) -> float:
        """Experts that so many tokens read, mean over routers without preference."""
        return self.count * (1 - (1 - self.per_token / self.count) ** num_tokens)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer; the cache stores key_dims + v_head_dim numbers per token and KV head.

    head_dim, value_dim: numbers of a query's product with a key, and of a weighted value, as attention over
                the cache computes them (of a latent: 576 and 512, absorbed)
    key_dims:   stored next to the value; of a latent cache the rotary part alone
    window:     tokens that are attended to at most; None: all
    chunked:    those of the query's chunk of so many, instead of the last ones
    sinks:      learned logits in the softmax's denominator
    expanded:   of a latent: numbers per token if keys and values of all heads were stored instead
    conv, summed: of a recurrent layer, numbers that it keeps of a sequence: the last inputs of a convolution,
                in the model's dtype, and what it sums up of all tokens, in fp32. Where it does not attend,
                heads and dims are 0
    linear, plain: weights, experts apart
    attention:  linear weights of its queries, keys, values and output, of linear
    kept:       of linear, what a quantised checkpoint leaves in the model's dtype
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    key_dims: int
    linear: int
    plain: int
    window: int | None = None
    chunked: bool = False
    sinks: bool = False
    latent: bool = False
    expanded: int = 0
    conv: int = 0
    summed: int = 0
    attention: int = 0
    kept: int = 0
    experts: Experts | None = None

    @property
    def attends(self) -> bool:
        return self.num_kv_heads > 0

    @property
    def is_recurrent(self) -> bool:
        return self.conv + self.summed > 0

    def state_bytes(self, bits: int) -> int:
        """Bytes that it keeps of one sequence. bits: of the model's dtype"""
        return (self.conv * bits + self.summed * STATE_BITS) // 8

    @property
    def held(self) -> Window | None:
        """The window that it needs of a sequence; None: all."""
        if self.window is None:
            return None
        return ChunkedWindow(self.window) if self.chunked else Window(self.window)

    @property
    def num_params(self) -> int:
        experts = self.experts
        routed = 0 if experts is None else experts.count * (experts.linear + experts.plain)
        return self.linear + self.plain + routed

    @property
    def active_linear(self) -> int:
        """Linear weights that one token is multiplied with."""
        return self.linear + (self.experts.per_token * self.experts.linear if self.experts else 0)

    @property
    def active_params(self) -> int:
        plain = self.experts.per_token * self.experts.plain if self.experts else 0
        return self.active_linear + self.plain + plain

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query token and one key: both products, all heads."""
        return 2 * self.num_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Sizes of a file's tensors, if they are of several kinds.

    kinds:  of tensors, with how many there are of each, the most first
    total:  bytes; routed: of routed experts; looked_up: of an embedding that is no head, too
    """

    kinds: tuple[tuple[str, int], ...]
    total: int
    routed: int
    looked_up: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. num_params and the like count numbers, not bytes.

    dtype:        that the checkpoint is in; a name of KV_CACHE_DTYPES, or whatever its config says
    embedding:    numbers of the embedding; the head has as many, and is the same where tied
    quantization: how the checkpoint's linear weights are stored, as `plan.weights` names it; None: in dtype
    stored:       the weights of the file that the shape was read from; None: of none
    notes:        sentences that an answer should carry: what was not counted
    """

    name: str
    model_type: str
    dtype: str
    hidden_size: int
    vocab_size: int
    max_position: int
    tied: bool
    layers: tuple[LayerShape, ...]
    final_plain: int
    quantization: str | None = None
    stored: StoredWeights | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        tables = self.embedding if self.tied else 2 * self.embedding
        return tables + self.final_plain + sum(layer.num_params for layer in self.layers)

    @property
    def active_params(self) -> int:
        """Parameters that one token reads: head and the experts it visits, no row of the embedding."""
        return self.embedding + self.final_plain + sum(layer.active_params for layer in self.layers)

    @property
    def active_linear(self) -> int:
        """Linear weights that one token is multiplied with, without the head, which prompts need once."""
        return sum(layer.active_linear for layer in self.layers)

    @property
    def pair_flops(self) -> int:
        """Attention's, of one query token and one key, over all layers, whatever windows they have."""
        return sum(layer.pair_flops for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts for layer in self.layers)

    @property
    def attention(self) -> tuple[LayerShape, ...]:
        """The layers that attend."""
        return tuple(layer for layer in self.layers if layer.attends)

    @property
    def has_states(self) -> bool:
        return any(layer.is_recurrent for layer in self.layers)

    def state_bytes(self, bits: int) -> int:
        """Bytes that recurrent layers keep of one sequence. bits: of the model's dtype"""
        return sum(layer.state_bytes(bits) for layer in self.layers)

    @property
    def has_windows(self) -> bool:
        return any(layer.window is not None for layer in self.layers)

    def kinds(self) -> Iterator[tuple[LayerShape, int]]:
        """Yield layers with different caches, and the number of each, in order of appearance."""
        keys = [replace(layer, linear=0, plain=0, attention=0, kept=0, experts=None) for layer in self.layers]
        for key in dict.fromkeys(keys):
            yield key, keys.count(key)

    def block_bytes(self, form: KVBytes, block_size: int) -> int:
        """Bytes of one block over all layers. Raises: InvalidArgumentError where the format has no such
        head dim."""
        if reason := form.unsupported_reason(self.layers):
            raise InvalidArgumentError(
                f"kv_cache_dtype {form.name} does not go with {self.name}: {reason}; use int8 or fp8_e4m3.",
                field="kv_cache_dtype",
            )
        return form.bytes_per_block(self.layers, block_size)

    def windowed_bytes(self, form: KVBytes, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Bytes of one sequence where layers with windows give back what lies behind them, as vLLM does:
        pages of the window and of one chunk, and one more."""
        total = 0
        for layer in self.layers:
            blocks = blocks_for(num_tokens, block_size)
            if layer.chunked and layer.window is not None:
                blocks = ChunkedWindow(layer.window).most_blocks(num_tokens, max_chunk, block_size)
            elif layer.window is not None:
                seen = blocks_for(min(layer.window - 1 + max_chunk, num_tokens), block_size) + 1
                blocks = min(blocks, seen)
            total += blocks * form.bytes_per_block((layer,), block_size)
        return total

    def read_share(self, length: int) -> float:
        """Share of a sequence's slots that a decode step reads: layers with windows read no further."""
        if not self.has_windows or length <= 0:
            return 1.0
        dims = [layer.num_kv_heads * (layer.key_dims + layer.v_head_dim) for layer in self.layers]
        seen = (min(length, layer.window or length) for layer in self.layers)
        return sum(d * n for d, n in zip(dims, seen, strict=True)) / (length * sum(dims))
