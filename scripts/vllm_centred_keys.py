"""What vLLM's own quantised caches cost, with and without centred keys: perplexity of held-out prose.

Every window is one prompt, computed in one step through the cache, so its log-probabilities show what the
cache loses.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvreclaim.bench import common
from kvreclaim.bench.common import Columns, Row, cells, markdown
from kvreclaim.bench.systems.base import SystemSetup
from kvreclaim.bench.systems.worker_process import VllmProcess, kv_bytes_per_token
from kvreclaim.corpora import prose
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model.loader import load_tokenizer
from kvreclaim.model_paths import real_model
from kvreclaim.outputs import write_json

BLOCK_SIZE = 32
EXACT = "auto"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared. centred: true, or a file of statistics, as centred_keys takes it"""

    model: Path
    python: Path
    dtypes: tuple[str, ...]
    centred: bool | str
    num_tokens: int
    num_windows: int
    threads: int

    @property
    def caches(self) -> list[tuple[str, bool | str]]:
        """(KV dtype, centred keys), the exact cache first."""
        return [(EXACT, False), *((dtype, own) for dtype in self.dtypes for own in (False, self.centred))]


def measure(plan: Plan, dtype: str, centred: bool | str, prompts: list[list[int]]) -> list[float]:
    """Log-probabilities of the windows' tokens, by an engine of its own."""
    num_blocks = blocks_for(plan.num_tokens + 1, BLOCK_SIZE) + 2
    pool_bytes = num_blocks * BLOCK_SIZE * kv_bytes_per_token(plan.model, 2)
    with closing(VllmProcess(plan.python, plan.threads, pool_bytes, plugin=True)) as vllm:
        vllm.load(
            SystemSetup(plan.model, "bfloat16", plan.threads),
            max_num_seqs=1,
            max_model_len=plan.num_tokens + 1,
            max_num_batched_tokens=plan.num_tokens + 1,
            num_gpu_blocks_override=num_blocks,
            block_size=BLOCK_SIZE,
            kv_cache_dtype=dtype,
            additional_config={"centred_keys": centred},
        )
        logprobs: list[float] = vllm.ask("prompt_logprobs", prompts=prompts)["logprobs"]
    return logprobs


def run(plan: Plan) -> list[Row]:
    """Returns: a row for each cache."""
    ids = load_tokenizer(plan.model).encode(prose().evaluation, add_special_tokens=False)
    starts = range(0, plan.num_windows * plan.num_tokens, plan.num_tokens)
    prompts = [list(ids[start : start + plan.num_tokens]) for start in starts]
    rows: list[Row] = []
    exact: list[float] = []
    for dtype, centred in plan.caches:
        found = measure(plan, dtype, centred, prompts)
        exact = exact or found
        apart = sum(abs(x - y) for x, y in zip(found, exact, strict=True)) / len(found)
        nats = -sum(found) / len(found)
        rows.append({"dtype": dtype, "centred": bool(centred), "nats": nats, "apart": apart})
    return rows


COLUMNS: Columns = {
    "KV dtype": "`{dtype}`",
    "keys": lambda row: "centred and scaled" if row["centred"] else "as they are",
    "perplexity": lambda row: f"{math.exp(row['nats']):.3f}",
    "nats from `auto`, mean over tokens": lambda row: f"{row['apart']:.3f}",
}


def _parse() -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=real_model(), help="what `kvreclaim fetch` brought")
    parser.add_argument("--vllm-python", type=Path, default=Path(".vllm-env/bin/python"))
    parser.add_argument("--kv-cache-dtypes", default="fp8_e4m3,fp8_e5m2")
    parser.add_argument("--stats", type=Path, help="of `kvreclaim calibrate`; default: the model's weights")
    parser.add_argument("--num-tokens", type=int, default=512, help="of a window")
    parser.add_argument("--num-windows", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.model is None:
        parser.error("there is no language model here; run `make real-model`, or pass --model")
    plan = Plan(
        model=args.model,
        python=args.vllm_python,
        dtypes=tuple(args.kv_cache_dtypes.split(",")),
        centred=True if args.stats is None else str(args.stats.absolute()),
        num_tokens=args.num_tokens,
        num_windows=args.num_windows,
        threads=args.threads,
    )
    return plan, args.json


def main() -> None:
    plan, json_file = _parse()
    rows = run(plan)
    print(markdown(COLUMNS, cells(COLUMNS, rows)))
    if json_file is not None:
        write_json(json_file, common.report(rows, shlex.join(["python", *sys.argv])))


if __name__ == "__main__":
    main()
