"""The demo model's tokenizer: one word, one token."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvreclaim.eval.vocabulary import EOS, PAD, TOKEN_IDS, TOKENS, UNK


def build_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits at white space, adds no token and joins with single spaces."""
    tokenizer = Tokenizer(WordLevel(TOKEN_IDS, unk_token=TOKENS[UNK]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TOKENS[EOS],
        pad_token=TOKENS[PAD],
        unk_token=TOKENS[UNK],
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )
