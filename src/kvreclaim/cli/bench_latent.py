"""`kvreclaim bench latent`: absorbed against expanded prefill over latents."""

from __future__ import annotations

from typing import Annotated

import typer

from kvreclaim.checks import check_choice
from kvreclaim.cli.bench_options import Dtype, Json, Kernels, Threads, command_line, ready
from kvreclaim.cli.takes import numbers_in


def latent(
    contexts: Annotated[str, typer.Option(help="Tokens before the new ones.")] = "0,1024,8192",
    new_tokens: Annotated[str, typer.Option(help="Tokens computed at once.")] = "16,64,128,171,256,512",
    heads: Annotated[int, typer.Option(min=1, help="Query heads: 16 in V2-Lite, 128 in V2 and V3.")] = 16,
    threads: Threads = 2,
    dtype: Dtype = "bfloat16",
    kernels: Kernels = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    kv_cache_dtype: Annotated[str, typer.Option(help="One KV format, or auto.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Json = None,
) -> None:
    """Prefill at DeepSeek-V3's head dims: absorbed queries, expanded keys, and which of them is taken."""
    with ready(threads):
        from kvreclaim.bench import common
        from kvreclaim.bench import latent as latent_bench
        from kvreclaim.config import format_name
        from kvreclaim.model.loader import DTYPES

        check_choice("--dtype", dtype, ("bfloat16", "float32"))
        plan = latent_bench.LatentPlan(
            contexts=numbers_in("--contexts", contexts),
            new_tokens=numbers_in("--new-tokens", new_tokens),
            heads=heads,
            dtype=DTYPES[dtype],
            device=device,
            kernels=kernels,
            kv_cache_dtype=format_name(kv_cache_dtype),
            rounds=rounds,
        )
        rows = latent_bench.run(plan)
        common.show(latent_bench.latent_table(rows))
        common.write_json(common.report(rows, command_line(), threads=threads), json_file)
