"""A run of vLLM 0.19 on an RTX 4090: fitted on its first fifth, all of it simulated.

Llama-3.1-8B in bf16, 300 ShareGPT requests at 10 a second, a pool of 2,588 blocks that is full most of the
time. requests.jsonl: https://github.com/casys-kaist/LLMServingSim, bench/examples/RTX4090 (MIT).
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from kvreclaim.kv_bytes import kv_bytes
from kvreclaim.plan.cards import find_card
from kvreclaim.plan.configs import load_shape
from kvreclaim.plan.cost import Linear
from kvreclaim.plan.roofline import roofline
from kvreclaim.plan.weights import weight_format
from kvreclaim.schedule import Footprint
from kvreclaim.sim.fit_log import fit_log, simulate_log
from kvreclaim.sim.log import read_log
from kvreclaim.sim.settings import Settings

DATA = Path(__file__).parent / "data" / "vllm-run-4090" / "requests.jsonl"
SHAPE = load_shape("Llama-3.1-8B")
ROOFLINE = roofline(SHAPE, find_card("4090"), weight_format("bf16", SHAPE), kv_bytes("auto", "bfloat16"))
ENGINE = Settings(
    num_blocks=2588,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_model_len=32_768,
    footprint=Footprint(block_size=16, max_chunk=2048),
)


def errors(cost: Linear) -> dict[str, float]:
    """Of the means over all requests, relative."""
    log = read_log(DATA)
    records = simulate_log([each.request for each in log], ENGINE, cost)
    found = {}
    for name in ("ttft_s", "e2e_s", "tpot_s"):
        said, made = ([getattr(each, name) for each in rows] for rows in (log, records))
        pairs = [pair for pair in zip(said, made, strict=True) if None not in pair]
        found[name] = fmean(made for _, made in pairs) / fmean(said for said, _ in pairs) - 1
    return found


def test_its_first_fifth_tells_the_rest() -> None:
    log = read_log(DATA)
    assert len(log) == 300
    fitted = fit_log(log, ENGINE, ROOFLINE, share=0.2)
    assert fitted.num_times < 0.2 * 2 * len(log)
    before, after = errors(ROOFLINE), errors(fitted.cost)
    assert max(map(abs, before.values())) > 0.1, "or there is nothing to fit"
    assert max(map(abs, after.values())) < 0.05, after
