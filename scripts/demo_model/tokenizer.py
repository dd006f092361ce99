"""The demo model's tokenizer: one word, one token."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvreclaim.eval.vocabulary import EOS, PAD, TOKEN_IDS, TOKENS, UNK

CHAT_TEMPLATE = """\
{%- if tools %}{{ tools | tojson }} {% endif -%}
{%- for message in messages -%}
  {%- if message.content is string -%}
    {{ message.content }}
  {%- else -%}
    {%- for part in message.content or [] -%}
      {{ part.text }}{% if not loop.last %} {% endif %}
    {%- endfor -%}
  {%- endif -%}
  {%- if message.tool_calls %} {{ message.tool_calls | tojson }}{% endif -%}
  {%- if not loop.last %} {% endif -%}
{%- endfor -%}"""
"""The contents of all messages, joined by single spaces; the model knows no roles, so none is written."""


def build_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits at white space, adds no token and joins with single spaces."""
    tokenizer = Tokenizer(WordLevel(TOKEN_IDS, unk_token=TOKENS[UNK]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TOKENS[EOS],
        pad_token=TOKENS[PAD],
        unk_token=TOKENS[UNK],
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )
    built.chat_template = CHAT_TEMPLATE
    return built
