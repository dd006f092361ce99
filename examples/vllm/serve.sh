#!/usr/bin/env bash
# A vLLM server with KV-cache compression. Arguments go to `vllm serve`.
#   ./serve.sh                                         Qwen3-0.6B, without statistics
#   MODEL=M STATS=/path/stats.safetensors ./serve.sh   query_mixture, with a file made by `kvreclaim calibrate`
set -euo pipefail
if [ -n "${STATS:-}" ]; then
  asked='{"kv_compression": {"policy": "query_mixture", "budget": 2048, "interval": 128, "stats": "'$STATS'"}}'
else
  asked='{"kv_compression": {"policy": "streaming_llm", "budget": 2048, "interval": 128}}'
fi
exec vllm serve "${MODEL:-Qwen/Qwen3-0.6B}" --additional-config "$asked" "$@"
