"""A useless model that writes any text, fast: a tiny one, with the real model's tokenizer if there is one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from kvreclaim import real_model

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny

MAX_LEN = 8192
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def save_writer(directory: Path) -> Path:
    real = real_model()
    if real is None:
        path = tiny.save_model("llama", directory, eos_token_id=262, max_position_embeddings=MAX_LEN)
        tiny.tokenizer().save_pretrained(path)
        return path
    more = {"vocab_size": 49_152, "eos_token_id": 2, "max_position_embeddings": MAX_LEN}
    path = tiny.save_model("llama", directory, **more)
    for name in TOKENIZER:
        if (Path(real) / name).exists():
            shutil.copy(Path(real) / name, path / name)
    return path
