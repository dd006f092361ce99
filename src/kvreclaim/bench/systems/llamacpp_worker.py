"""llama.cpp's side of the benchmarks: a worker of worker_loop.py for the interpreter of llama-cpp-python's
environment. Imports nothing of kvreclaim.
"""

from __future__ import annotations

import ctypes
import time
from importlib.metadata import version
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np

Answer = dict[str, Any]
Prompts = list[list[int]]
BATCH = 2048
SEED_TOKENS = 512
"""Length of the computed prompt that a synthetic fill repeats."""
CELL = np.dtype([("pos", "<i4"), ("num_sequences", "<u4"), ("sequence", "<i4")])
CACHE_TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0, "q4_0": lib.GGML_TYPE_Q4_0}


class LlamaCppStreams:
    """A context with separate streams per sequence, which costs llama.cpp less than a common one."""

    def __init__(self, model: Any, threads: int, cache_type: int, batch: int, max_len: int) -> None:
        params = lib.llama_context_default_params()
        self.batch, self.length = batch, -(-max_len // 256) * 256
        params.n_ctx, params.n_seq_max = self.length * batch, batch
        params.n_batch, params.n_ubatch = BATCH, min(BATCH, params.n_ubatch)
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = cache_type
        params.flash_attn_type, params.kv_unified = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED, False
        self.context = lib.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"no context for {batch} sequences of {max_len} tokens; see the log")
        self.memory = lib.llama_get_memory(self.context)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.tokens = lib.llama_batch_init(BATCH, 0, 1)
        self.lengths = [0] * batch

    def feed(self, items: list[tuple[int, int, bool]]) -> None:
        """Feed tokens of sequences, in order: (sequence, token, whether its logits are needed)."""
        batch, self.tokens.n_tokens = self.tokens, len(items)
        for i, (sequence, token, needs_logits) in enumerate(items):
            batch.token[i], batch.pos[i] = token, self.lengths[sequence]
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, needs_logits
            self.lengths[sequence] += 1
        if code := lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode answered {code}")

    def prompt(self, sequence: int, tokens: list[int]) -> int:
        """Compute a prompt. Returns: its next token."""
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            self.feed([(sequence, token, start + i == len(tokens) - 1) for i, token in enumerate(part)])
        return self.best(1)[0]

    def best(self, count: int) -> list[int]:
        """The likeliest tokens of the requested logits."""
        logits = lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (count, self.vocab_size)).argmax(1).tolist()

    def step(self, last: list[int]) -> list[int]:
        """Compute one token of each sequence."""
        self.feed([(sequence, token, True) for sequence, token in enumerate(last)])
        return self.best(len(last))

    def state(self) -> np.ndarray:
        """The first sequence's state in llama.cpp's format."""
        size = lib.llama_state_seq_get_size(self.context, 0)
        state = np.empty(size, np.uint8)
        wrote = lib.llama_state_seq_get_data(self.context, _bytes(state), size, 0)
        return state[:wrote]

    def set_state(self, state: np.ndarray, sequence: int, length: int) -> None:
        """Set a sequence's state, which has `length` tokens."""
        if not lib.llama_state_seq_set_data(self.context, _bytes(state), state.size, sequence):
            raise RuntimeError("llama.cpp refused a state that repeats a prompt's; pass --fill prefill")
        held = lib.llama_memory_seq_pos_max(self.memory, sequence) + 1
        if held != length:
            raise RuntimeError(f"a filled sequence holds {held} tokens, not {length}; pass --fill prefill")
        self.lengths[sequence] = length

    def clear(self) -> None:
        lib.llama_memory_clear(self.memory, False)
        self.lengths = [0] * self.batch

    def close(self) -> None:
        lib.llama_batch_free(self.tokens)
        lib.llama_free(self.context)


def _bytes(array: np.ndarray) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def repeated(state: np.ndarray, length: int) -> np.ndarray:
    """Build a sequence's state of `length` tokens by repeating the keys and values of the given one.

    Raises: ValueError for another format than a plain cache's.
    """
    at = 0

    def take(dtype: Any, count: int = 1) -> np.ndarray:
        nonlocal at
        size = np.dtype(dtype).itemsize * count
        if at + size > state.size:
            raise ValueError("the state is laid out in a way that is not known here; pass --fill prefill")
        found = state[at : at + size].view(dtype)
        at += size
        return found

    made = [take(np.uint8, 8)]  # a mark and the sequence
    streams, held = (int(each) for each in take("<u4", 2))
    made.append(np.array([streams, length], "<u4").view(np.uint8))
    take(CELL, held)
    cells = np.zeros(length, CELL)
    cells["pos"], cells["num_sequences"] = np.arange(length), 1
    transposed, layers = (int(each) for each in take("<u4", 2))
    if transposed:
        raise ValueError("the values are transposed, so flash attention is off; pass --fill prefill")
    made += [cells.view(np.uint8), np.array([0, layers], "<u4").view(np.uint8)]
    for _ in range(2 * layers):
        made.append(take(np.uint8, 12))  # a row's type and size
        rows = take(np.uint8, held * int(made[-1][4:].view("<u8")[0])).reshape(held, -1)
        made.append(rows[np.arange(length) % held].ravel())
    rest = take("<u4", streams - 1)
    if rest.any() or at != state.size:
        raise ValueError("the state holds more than keys and values; pass --fill prefill")
    return np.concatenate([*made, rest.view(np.uint8)])


class LlamaCppWorker:
    """Holds a model and the sequences of the open point."""

    def __init__(self) -> None:
        self.opened: LlamaCppStreams | None = None
        self.check_streams: LlamaCppStreams | None = None

    def load(self, *, model: str, threads: int, cache_type: str) -> Answer:
        """Load a file. Answers versions, build features and bytes of a token."""
        lib.llama_backend_init()
        self.threads, self.cache_type = threads, cache_type
        self.model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}; see the log")
        return {
            "llama-cpp-python": version("llama-cpp-python"),
            "build": lib.llama_print_system_info().decode().strip(),
            "vocab_size": lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)),
            "token_bytes": self._token_bytes(),
        }

    def _token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers, for heads of the usual size."""
        heads = lib.llama_model_n_head(self.model)
        width = lib.llama_model_n_embd(self.model) // heads * lib.llama_model_n_head_kv(self.model)
        bits = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}[self.cache_type]
        return int(2 * lib.llama_model_n_layer(self.model) * width * bits / 8)

    def _sequences(self, batch: int, max_len: int) -> LlamaCppStreams:
        return LlamaCppStreams(self.model, self.threads, CACHE_TYPES[self.cache_type], batch, max_len)

    def open(self, *, prompts: Prompts, max_tokens: int, synthetic: bool) -> Answer:
        """Fill a cache with the prompts. synthetic: compute the beginning of each and repeat it."""
        started = time.perf_counter()
        length = len(prompts[0])
        self.opened = opened = self._sequences(len(prompts), length + max_tokens)
        if synthetic and length > SEED_TOKENS:
            first = opened.prompt(0, prompts[0][:SEED_TOKENS])
            state = repeated(opened.state(), length)
            for sequence in range(len(prompts)):
                opened.set_state(state, sequence, length)
            self.last = [first] * len(prompts)
        else:
            self.last = [opened.prompt(i, prompt) for i, prompt in enumerate(prompts)]
        self.last = opened.step(self.last)
        return {"fill_s": time.perf_counter() - started}

    def run(self, *, steps: int) -> Answer:
        """Time some steps. Answers seconds and tokens."""
        assert self.opened is not None, "a point is open"
        started = time.perf_counter()
        for _ in range(steps):
            self.last = self.opened.step(self.last)
        return {"elapsed_s": time.perf_counter() - started, "tokens": steps * len(self.last)}

    def close(self) -> Answer:
        """Free the open point's cache."""
        if self.opened is not None:
            self.opened.close()
            self.opened = None
        return {}

    def generate(self, *, prompts: Prompts, max_tokens: int) -> Answer:
        """Greedy tokens of each prompt, one after the other."""
        length = max(map(len, prompts)) + max_tokens
        if self.check_streams is None or self.check_streams.length < length:
            if self.check_streams is not None:
                self.check_streams.close()
            self.check_streams = self._sequences(1, length)
        answers = []
        for prompt in prompts:
            self.check_streams.clear()
            drawn = [self.check_streams.prompt(0, prompt)]
            while len(drawn) < max_tokens:
                drawn += self.check_streams.step(drawn[-1:])
            answers.append(drawn)
        return {"tokens": answers}
