"""The calls of llama.cpp that the worker makes, on a model of one rule: the next token is 3 x mod 200.

A key is its token, a state is written as llama.cpp writes one; the last token cannot be decoded.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np

GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 = 1, 8, 2
LLAMA_FLASH_ATTN_TYPE_ENABLED = 1
VOCAB = 265


class Context:
    def __init__(self, params):
        assert params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_ENABLED
        assert not params.kv_unified
        self.room = params.n_ctx // params.n_seq_max
        self.keys = [[] for _ in range(params.n_seq_max)]
        self.logits = None


def llama_backend_init():
    pass


def llama_model_default_params():
    return SimpleNamespace()


def llama_context_default_params():
    return SimpleNamespace(n_ubatch=512)


def llama_model_load_from_file(path, params):
    return path


def llama_model_get_vocab(model):
    return model


def llama_vocab_n_tokens(vocab):
    return VOCAB


def llama_print_system_info():
    return b"CPU : STUB = 1"


def llama_model_n_head(model):
    return 4


def llama_model_n_head_kv(model):
    return 2


def llama_model_n_embd(model):
    return 64


def llama_model_n_layer(model):
    return 1


def llama_init_from_model(model, params):
    return Context(params)


def llama_get_memory(context):
    return context


def llama_free(context):
    context.keys = None


def llama_batch_init(tokens, embd, sequences):
    lists = {name: [None] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
    return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(tokens)], **lists)


def llama_batch_free(batch):
    pass


def llama_decode(context, batch):
    wanted = []
    for i in range(batch.n_tokens):
        keys = context.keys[batch.seq_id[i][0]]
        if batch.token[i] == VOCAB - 1:
            return 1
        assert batch.pos[i] == len(keys) < context.room
        keys.append(batch.token[i])
        if batch.logits[i]:
            wanted.append(3 * batch.token[i] % 200)
    context.logits = np.zeros((len(wanted), VOCAB), np.float32)
    context.logits[np.arange(len(wanted)), wanted] = 1
    return 0


def llama_get_logits(context):
    return context.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def llama_memory_clear(context, data):
    context.keys = [[] for _ in context.keys]


def llama_memory_seq_pos_max(context, sequence):
    return len(context.keys[sequence]) - 1


def _state(context, sequence):
    keys = np.array(context.keys[sequence], np.float32)
    cells = [(at, 1, sequence) for at in range(len(keys))]
    rows = np.array([0], "<i4").tobytes() + np.array([4], "<u8").tobytes() + keys.tobytes()
    ints = [0xAF143CD8, sequence, len(context.keys), len(keys), *np.ravel(cells), 0, 1]
    rest = [0] * (len(context.keys) - 1)
    return np.array(ints, "<u4").tobytes() + 2 * rows + np.array(rest, "<u4").tobytes()


def llama_state_seq_get_size(context, sequence):
    return len(_state(context, sequence))


def llama_state_seq_get_data(context, target, size, sequence):
    state = _state(context, sequence)
    ctypes.memmove(target, state, len(state))
    return len(state)


def llama_state_seq_set_data(context, source, size, sequence):
    state = ctypes.string_at(source, size)
    streams, held = np.frombuffer(state, "<u4", 2, 8)
    assert streams == len(context.keys)
    at = 16 + 12 * held + 8 + 12
    context.keys[sequence] = [int(key) for key in np.frombuffer(state, "<f4", held, at)]
    assert _state(context, sequence)[12 : at + 4 * held] == state[12 : at + 4 * held] or sequence
    return size
