"""vLLM's LLM with the plugin: one prompt with the engine's budget, with a smaller one, and uncompressed.

python offline.py --model Qwen/Qwen3-0.6B
python offline.py --model M --policy query_mixture --stats stats.safetensors   # from `kvreclaim calibrate`
"""

from __future__ import annotations

import argparse
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", default="streaming_llm")
    parser.add_argument("--stats", help="query statistics, for policies that need them")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=300)
    given = parser.parse_args()
    compression = {"policy": given.policy, "budget": given.budget, "interval": 128, "stats": given.stats}

    from vllm import LLM, SamplingParams

    llm = LLM(
        given.model,
        max_model_len=8192,
        block_size=32,
        enforce_eager=True,  # starts sooner; compiled and with CUDA graphs it works the same
        additional_config={"kv_compression": compression},
    )
    prompt = "Every line of this text says the same. " * 40

    def generate(name: str, settings: Any = None) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=given.max_tokens,
            ignore_eos=True,
            extra_args=None if settings is None else {"kv_compression": settings},
        )
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        figures = (output.kv_transfer_params or {}).get("kvreclaim", "not compressed")
        print(
            f"{name}: {len(output.prompt_token_ids)} + {len(output.outputs[0].token_ids)} tokens, {figures}"
        )

    generate("the engine's settings")
    generate("a smaller budget", {"budget": given.budget // 2, "recent": 64})
    generate("switched off", "off")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
