"""Features of a request, an engine or a model."""

from __future__ import annotations

from enum import Enum, StrEnum, auto


class Kind(Enum):
    """What a feature belongs to. Only rows name a STATE: a variant of a feature, an option or a lack. A FIELD
    is one of an HTTP body, which the server refuses."""

    REQUEST = auto()
    POLICY = auto()
    ENGINE = auto()
    PLUGIN = auto()
    SESSION = auto()
    MODEL = auto()
    STATE = auto()
    FIELD = auto()


class Feature(StrEnum):
    """A feature. In messages, its name in braces stands for the policy, the option's value or the model's
    name."""

    kind: Kind

    def __new__(cls, text: str, kind: Kind = Kind.STATE) -> Feature:
        feature = str.__new__(cls, text)
        feature._value_, feature.kind = text, kind
        return feature

    VERIFY = "verify mode", Kind.REQUEST
    SPARSE_PREFILL = "sparse prefill", Kind.REQUEST
    CHUNK_REUSE = "chunk reuse", Kind.REQUEST
    COMPRESS_AT = "compress_prompt_at", Kind.REQUEST
    DROPS = "drop_spans", Kind.REQUEST
    BEAM_SEARCH = "beam search", Kind.REQUEST
    SEVERAL_OUTPUTS = "n > 1", Kind.REQUEST
    PROMPT_LOGPROBS = "prompt_logprobs", Kind.REQUEST
    SCORING = "scoring a continuation", Kind.REQUEST
    SESSION = "saved sessions", Kind.SESSION
    PROTECT_PROMPT = "protect_prompt", Kind.REQUEST
    SKIPS_BLOCKS = "sparse prefill that skips blocks"
    GENERATION = "generating tokens"
    PRIORITY = "priority"
    STOP_STRINGS = "stop strings"
    BAD_WORDS = "bad_words"
    STRUCTURED_OUTPUTS = "structured outputs"
    THINKING_BUDGET = "thinking_token_budget"
    UNKNOWN_REASONING = "an unknown format of reasoning"
    DROP_AT = "drop_at"
    NO_EVICTION = "a compression that evicts nothing"
    NO_DROPS = "no drop_spans"
    SAMPLING = "fields of sampling", Kind.FIELD
    FORCED_CALLS = "a forced call", Kind.FIELD
    CONTINUED = "a continued message in the format harmony", Kind.FIELD
    NO_REASONING = "an answer without reasoning"
    LOSSY_DROP = "kv_drop lossy", Kind.FIELD
    ECHO = "echo", Kind.FIELD
    STREAM = "stream", Kind.FIELD
    TRUNCATION = "truncation auto", Kind.FIELD
    RETENTION = "a retention"
    MAX_LOSS = "max_loss"
    POLICY_OPTIONS = "options of a policy"
    AUTO_POLICY = "policy auto"

    EVICTS = "a policy that evicts", Kind.POLICY
    READS_SPARSELY = "a policy that reads some blocks (`quest`)", Kind.POLICY
    WHOLE_BLOCKS = "a policy that evicts whole blocks (`paged_eviction`)", Kind.POLICY
    UNEQUAL_HEADS = "a policy with unequal heads (`shares`, `ada_kv`, `pyramidkv`)", Kind.POLICY
    CACHE_POSITIONS = (
        "a policy with positions relative to the cache (`streaming_llm(positions=cache)`)",
        Kind.POLICY,
    )
    PROMPT_ONLY = "a policy for the prompt alone (`kvzip`, `snapkv(when=prefill)`)", Kind.POLICY
    TOKEN_SCORES = "a policy that scores tokens as they are computed (`kvzap`)", Kind.POLICY
    ATTENTION_MASS = "a policy that sums attention (`h2o`)", Kind.POLICY
    RECENT_QUERIES = "a policy that looks at recent queries (`snapkv`, `r_kv`, `tova`)", Kind.POLICY
    FUTURE_QUERIES = "a policy that needs the text to come (`oracle`)", Kind.POLICY
    READS_AGAIN = "a policy that reads the prompt again (`kvzip`)", Kind.POLICY
    OUTPUT_PROJECTION = "a policy that needs the output projection (`critical`)", Kind.POLICY
    KEEPS_ALL = "a policy that keeps all tokens (`full`)"
    KEEPS_BLOCKS = "a policy that frees no blocks"
    NOT_COMPACTED = "a policy that does not compact equal heads"
    EVERY_PASS = "a policy that compresses while decoding"
    NEEDS_ROTATION = "a policy that rotates keys or reads statistics"

    HOST_CACHE = "full_cache_host_size", Kind.ENGINE
    OFFLOADING = "kv_offloading_size", Kind.ENGINE
    DISK = "kv_offloading_disk_path", Kind.ENGINE
    DRAFTS = "speculative_config", Kind.ENGINE
    BATCH_INVARIANT = "batch_invariant", Kind.ENGINE
    QUANTISED = "a quantised KV format", Kind.ENGINE
    NO_OFFLOADING = "kv_offloading_size=0"
    SWAP = "preemption_mode=swap"
    FIRST_COME = "scheduling_policy=fcfs"
    NO_PREFIX_CACHE = "enable_prefix_caching=False"
    ROTATED = "a rotated KV format"
    VLLM = "the vLLM plugin", Kind.PLUGIN

    WINDOW_TABLES = "sliding windows with block tables of their own", Kind.MODEL
    SHARED_WINDOWS = "sliding windows in the block table of all layers", Kind.MODEL
    RECURRENT = "recurrent layers (hybrid models)", Kind.MODEL
    LATENT = "latent attention (MLA)", Kind.MODEL
    WINDOWS = "sliding windows or chunked attention"
    ALL_WINDOWS = "sliding windows in all layers"
    UNKNOWN_ROTATION = "an unknown rotary embedding"
    NO_TOKENIZER = "no tokenizer"
    NO_END = "no end-of-sequence token"
