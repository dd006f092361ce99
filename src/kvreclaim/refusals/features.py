"""Features of a request, an engine or a model, and rows of the compatibility table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Feature(StrEnum):
    """A feature of a request, an engine or a model. Braces in a message stand for the policy, the option's
    value or the model's name."""

    # a request
    VERIFY = "verify mode"
    RECALL = "recall"
    RECALL_BETWEEN_PASSES = "recall between passes"
    SPARSE_PREFILL = "sparse prefill"
    SKIPS_BLOCKS = "sparse prefill that skips blocks"
    CHUNK_REUSE = "chunk reuse"
    COMPRESS_AT = "compress_prompt_at"
    DROPS = "drop_spans"
    BEAM_SEARCH = "beam search"
    SEVERAL_OUTPUTS = "n > 1"
    PROMPT_LOGPROBS = "prompt_logprobs"
    SCORING = "scoring a continuation"
    GENERATION = "generating tokens"
    SESSION = "saved sessions"
    PROTECT_PROMPT = "protect_prompt"
    # its policy
    EVICTS = "a policy that evicts"
    KEEPS_ALL = "a policy that keeps all tokens (`full`)"
    KEEPS_BLOCKS = "a policy that frees no blocks"
    READS_SPARSELY = "a policy that reads some blocks (`quest`)"
    WHOLE_BLOCKS = "a policy that evicts whole blocks (`paged_eviction`)"
    UNEQUAL_HEADS = "a policy with unequal heads (`shares`, `ada_kv`, `pyramidkv`)"
    NOT_COMPACTED = "a policy that does not compact equal heads"
    CACHE_POSITIONS = "a policy with positions relative to the cache (`streaming_llm(positions=cache)`)"
    PROMPT_ONLY = "a policy for the prompt alone (`kvzip`, `snapkv(when=prefill)`)"
    EVERY_PASS = "a policy that compresses while decoding"
    TOKEN_SCORES = "a policy that scores tokens as they are computed (`kvzap`)"
    ATTENTION_MASS = "a policy that sums attention (`h2o`)"
    RECENT_QUERIES = "a policy that looks at recent queries (`snapkv`, `r_kv`, `tova`)"
    FUTURE_QUERIES = "a policy that needs the text to come (`oracle`)"
    READS_AGAIN = "a policy that reads the prompt again (`kvzip`)"
    OUTPUT_PROJECTION = "a policy that needs the output projection (`critical`)"
    # the engine
    HOST_CACHE = "full_cache_host_size"
    OFFLOADING = "kv_offloading_size"
    RECALL_SIZE = "kv_recall_size"
    DISK = "kv_offloading_disk_path"
    NO_PREFIX_CACHE = "enable_prefix_caching=False"
    DRAFTS = "speculative_config"
    BATCH_INVARIANT = "batch_invariant"
    ROTATED = "a rotated KV format"
    QUANTISED = "a quantised KV format"
    VLLM = "the vLLM plugin"
    # the model
    WINDOW_TABLES = "sliding windows with block tables of their own"
    SHARED_WINDOWS = "sliding windows in the block table of all layers"
    WINDOWS = "sliding windows or chunked attention"
    ALL_WINDOWS = "sliding windows in all layers"
    RECURRENT = "recurrent layers (hybrid models)"
    LATENT = "latent attention (MLA)"
    UNEQUAL_LAYERS = "layers with unequal heads"
    UNKNOWN_ROTATION = "an unknown rotary embedding"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Features that do not work together.

    message: {feature} in it is the caller's name of it; reason: its part that is unique to the row
    """

    features: tuple[Feature, ...]
    field: str
    message: str
    reason: str = ""


def rows(field: str, template: str, *rows: tuple[tuple[Feature, ...], str]) -> tuple[Refusal, ...]:
    """Make rows with a common message frame; `*` in it is the row's own reason and remedy."""
    return tuple(Refusal(features, field, template.replace("*", why), why) for features, why in rows)
