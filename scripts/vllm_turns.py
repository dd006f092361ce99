"""Which share of agents' prompts vLLM serves from its cache: exact blocks alone, and with snapshots.

Replays the sessions of `kvreclaim eval --tasks agent_recorded` (pip install "kvreclaim[agents]") in
vLLM's own scheduler and block pool with the plugin. No model runs: the recorded answers are what it says, and
what is served depends on tokens and lengths alone. Needs the environment with vLLM.

    make vllm-env; .vllm-env/bin/python scripts/vllm_turns.py --model DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm_plugin"))

from simulation import make_scheduler  # first: it imports vLLM
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from kvreclaim.eval.agents import recorded_sessions
from kvreclaim.eval.task import Item
from kvreclaim.eval.text.prose import Encoder
from kvreclaim.model.loader import load_tokenizer

BLOCK_SIZE = 16


def serve(scheduler: Any, name: str, turn: Item) -> int:
    """One turn to its end. Returns: tokens of its prompt that the cache had."""
    answer = list(turn.continuation)
    params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    request = Request(name, list(turn.prompt), params, None, block_hasher=hasher)
    scheduler.add_request(request)
    served = 0
    while scheduler.has_requests():
        output = scheduler.schedule()
        served += sum(data.num_computed_tokens for data in output.scheduled_new_reqs)
        ids = list(output.num_scheduled_tokens)
        is_due = request.num_computed_tokens >= request.num_tokens
        said = [[answer[request.num_output_tokens]] if is_due else [] for _ in ids]
        scheduler.update_from_output(output, ModelRunnerOutput(ids, dict.fromkeys(ids, 0), said))
    return served


def shares(model: Path, sessions: Sequence[Item], compression: Mapping[str, Any] | None, args: Any) -> str:
    """Of all turns but the first of each session: tokens of prompts, and which share the cache served."""
    lengths = {"max_model_len": args.num_tokens, "max_num_batched_tokens": args.chunk}
    served = prompts = 0
    for session in sessions:
        scheduler = make_scheduler(model, args.blocks, compression, block_size=BLOCK_SIZE, **lengths)
        for number, turn in enumerate(session.turns):
            found = serve(scheduler, str(number), turn)
            if number:
                served, prompts = served + found, prompts + len(turn.prompt)
    return f"{served:,} of {prompts:,} prompt tokens ({served / prompts:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="a directory with tokenizer and config.json"
    )
    parser.add_argument("--num-tokens", type=int, default=32_768, help="the longest session")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=2048, help="--max-num-batched-tokens")
    parser.add_argument("--blocks", type=int, default=4096, help="of the pool, 16 tokens each")
    args = parser.parse_args()
    init_none_hash(sha256)
    tokenizer = load_tokenizer(args.model)
    task = recorded_sessions(Encoder(tokenizer), args.num_tokens)
    sessions = [task.item(0, index) for index in range(task.num_examples(sys.maxsize))]
    turns = sum(len(session.turns) for session in sessions)
    print(f"{len(sessions)} sessions, {turns} turns; the first turn of each is not counted")
    settings = {"policy": "keydiff", "budget": args.budget, "interval": args.interval}
    for name, snapshots in (("exact blocks", False), ("with snapshots", True)):
        print(
            f"{name}: {shares(args.model, sessions, {**settings, 'snapshots': snapshots}, args)}", flush=True
        )
    print(f"without compression: {shares(args.model, sessions, None, args)}")


if __name__ == "__main__":
    main()
