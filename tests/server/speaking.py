"""A model whose output a request's own fields determine, word by word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

WORDS = (
    "<eos>",
    "<unk>",
    "<tool_call>",
    '{"name":"weather",',
    '"arguments":{"city":"Bern"}}',
    "</tool_call>",
    "Let",
    "me",
    "look.",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    'weather{"city":',
    '"Bern"}',
)
CALL, MISTRAL_CALL = WORDS[2:6], WORDS[11:14]
MAX_WORDS = 9


def save_speaker(directory: Path, chat_template: str) -> Path:
    """Weights so small that no word is likelier than another; each of WORDS is a token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config("llama", eos_token_id=0))
    model.generation_config.eos_token_id = 0
    model.save_pretrained(directory)
    others = {f"w{number}": number for number in range(len(WORDS), tiny.VOCAB_SIZE)}
    vocab = {word: number for number, word in enumerate(WORDS)} | others
    backend = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<eos>", "[TOOL_CALLS]")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


def biased(*words: str) -> dict[str, Any]:
    """Fields of a request that make the model generate these words, each of them once, and an end: each is
    biased less than the one before it, and words that have been generated are penalised."""
    assert len(words) == len(set(words)) <= MAX_WORDS
    output = [*words, "<eos>"]
    bias = {str(WORDS.index(word)): 100.0 - 10.0 * place for place, word in enumerate(output)}
    return {"temperature": 0.0, "repetition_penalty": 100.0, "logit_bias": bias}
