"""Where vLLM 0.32 checks at start whether the pool is large enough: functions of (configuration, groups)."""

MODULE = "vllm.v1.core.kv_cache_utils"
NEEDED = "_max_memory_usage_bytes_from_groups"
PER_BLOCK = "_pool_bytes_per_block"
