"""`kvreclaim bench serve`."""

from __future__ import annotations

from typing import Annotated, Any

from kvreclaim.bench.plans import ServePlan
from kvreclaim.cli.bench_options import Json, Model, command_line, model_directory, ready
from kvreclaim.cli.takes import Takes, takes


@takes
def serve(
    plan: Annotated[dict[str, Any], Takes(config=ServePlan, build=dict)],
    model: Model = None,
    json_file: Json = None,
) -> None:
    """Throughput and time to first token through HTTP, beside the engine alone."""
    serve_plan = ServePlan(model=model_directory(model), **plan)
    with ready(serve_plan.threads):
        from kvreclaim.bench import common
        from kvreclaim.bench import serve as bench

        rows = bench.run(serve_plan)
        common.show(bench.serve_table(rows))
        common.write_json(common.report(rows, command_line()), json_file)
