"""`kvreclaim bench prefix`: hit rates of a recorded trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvreclaim.cli.bench_options import Json, command_line
from kvreclaim.cli.takes import names_in, numbers_in, usage_errors


def prefix(
    trace: Annotated[Path, typer.Option(help="JSON lines with hash_ids, such as Mooncake's.")],
    blocks: Annotated[str, typer.Option(help="Sizes of the cache, in blocks of the trace.")] = (
        "1000,4000,16000,64000"
    ),
    orders: Annotated[
        str, typer.Option(help="Eviction orders, comma-separated.")
    ] = "lru,slru,lfu,priority,gdsf",
    pins: Annotated[
        bool, typer.Option("--pins", help="Also two tenants, one of which pins all it sends.")
    ] = False,
    json_file: Json = None,
) -> None:
    """Prefix hit rates of a block-hash trace, by eviction order and size of the cache."""
    with usage_errors():
        from kvreclaim.bench import common, prefix_pins
        from kvreclaim.bench import prefix as prefix_bench

        plan = prefix_bench.PrefixPlan(trace, numbers_in("--blocks", blocks), tuple(names_in(orders)))
        progress = common.wide_console(stderr=True)
        rows = prefix_bench.run(plan, progress.print)
        common.show(prefix_bench.prefix_table(rows, trace))
        extra = {}
        if pins:
            extra["pins"] = prefix_pins.run(trace, plan.sizes)
            common.show(prefix_pins.pins_table(extra["pins"]))
        if json_file is not None:
            common.write_json(common.report(rows, command_line(), trace=trace.name, **extra), json_file)
