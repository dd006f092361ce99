"""Where vLLM 0.33 checks at start whether the pool is large enough: functions of (builder, configuration,
groups). The builder, which platforms may replace, says what a block takes."""

MODULE = "vllm.v1.core.kv_cache_planning"
NEEDED = "_max_memory_usage_bytes_from_groups"
PER_BLOCK = "_pool_bytes_per_block_from_builder"
