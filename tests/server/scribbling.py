"""A model that writes at random, with the special tokens of several formats of calls."""

from __future__ import annotations

from pathlib import Path

import tiny
from call_markers import MARKERS
from tokenizers import AddedToken

TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if begin }}"
)
TERSE = {
    str(token): -100.0 for token in range(262) if (tiny.tokenizer().decode([token]).strip() in ("", "a"))
}
"""Biases against white space where it may be left out, and against analysis in the format harmony."""


def save_scribbler(directory: Path) -> Path:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(each, special=True) for each in MARKERS]}
    )
    tokenizer.chat_template = TEMPLATE
    eos = tokenizer.eos_token_id
    tiny.save_model(
        "llama", directory, eos_token_id=eos, vocab_size=len(tokenizer) + 2, max_position_embeddings=2048
    )
    tokenizer.save_pretrained(directory)
    return directory
