"""Tokenizers as SentencePiece's: words bring their space, which decoding takes from the first one of a text.

>>> tiny_spaced.tokenizer("strip")  # <unk>, a token for each byte (1 + byte), WORDS, <s>, <eos>
"""

from __future__ import annotations

import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

KINDS = ("strip", "metaspace")
"""Llama 2's decoder, and that of SentencePiece vocabularies with a Metaspace."""
WORDS = ["▁the", "the", "▁end", "end", "▁", "a", "▁a"]


def tokenizer(kind: str = "strip") -> PreTrainedTokenizerFast:
    """Text is encoded as bytes and spaces; words are there to be generated."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    if kind == "strip":
        space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<eos>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<eos>")
    fast.chat_template = tiny.CHAT_TEMPLATE
    return fast
