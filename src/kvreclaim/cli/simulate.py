"""`kvreclaim simulate`: a trace through the engine's own scheduler and memory, without a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.options import Figures, picture
from kvreclaim.outputs import write_json
from kvreclaim.plan.targets import parse_targets
from kvreclaim.sim.options import ENGINE, LOAD, MACHINE, ReplicaOptions, Serving, Traffic, without_compression
from kvreclaim.sim.routers import ROUTERS
from kvreclaim.sim.scenario import AXES

if TYPE_CHECKING:
    from kvreclaim.sim.scenario import Scenario
    from kvreclaim.sim.traces.trace import Trace

WIDTH = 110
WHOLE = "whole cache"
UNDEFINED = "–"


@with_config
def simulate(
    traffic: Annotated[Traffic, ConfigOptions(config=Traffic, panel=LOAD)],
    machine: Annotated[ReplicaOptions, ConfigOptions(config=ReplicaOptions, panel=MACHINE)],
    serving: Annotated[Serving, ConfigOptions(config=Serving, panel=ENGINE)],
    replicas: Annotated[
        int, typer.Option(min=1, max=65_536, help="Number of engine replicas behind the router.")
    ] = 1,
    router: Annotated[str, typer.Option(help=f"Router: {', '.join(ROUTERS)}.")] = "rr",
    scrape: Annotated[
        float,
        typer.Option(min=0.0, max=1e9, help="Seconds between the router's updates on its replicas."),
    ] = 0.0,
    slo: Annotated[
        str | None, typer.Option(help="Latency targets, such as ttft=2s,tpot=60ms,e2e=30s.")
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(help=f"Find the best value at which 99 % of requests meet --slo: {', '.join(AXES)}."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare with the same run without compression.")
    ] = False,
    chart: Annotated[
        Path | None,
        typer.Option(help="Image file for a chart of pool, queue and hits over time.", callback=picture),
    ] = None,
    json_file: Figures = None,
) -> None:
    """Simulate serving a trace: latencies, hits, preemptions, blocks and cost. Or search for what meets
    latency targets."""
    from kvreclaim.sim.search import Search

    facts = {"num_replicas": replicas, "router": router, "scrape_s": scrape, "targets": parse_targets(slo)}
    build = partial(_scenario, traffic.requested(), facts)
    promise = serving.promise_on(machine)
    chosen = machine if promise is None else replace(machine, kv_cache_dtype=promise.kv_cache_dtype)
    scenario = build(chosen, serving)
    console = Console(markup=False)
    console = console if console.is_terminal else Console(markup=False, width=WIDTH)
    if search is not None:
        found = Search(scenario, search).run()
        _show_search(found, console)
    else:
        plain = build(machine, without_compression(serving)) if compare else None
        found = _report(scenario, plain, _name(serving), chart, console)
    if json_file is not None:
        write_json(json_file, found)


def _scenario(trace: Trace, facts: dict[str, Any], machine: ReplicaOptions, serving: Serving) -> Scenario:
    from kvreclaim.sim.scenario import Scenario

    cost = machine.cost(serving.block_size)
    return Scenario(trace, serving.settings(machine, cost), cost, price=machine.hourly(), **facts)


def _name(serving: Serving) -> str:
    """Name of the run in tables and charts."""
    if serving.max_loss is not None:
        return f"max loss {serving.max_loss:g}"
    return serving.compression or WHOLE


def _report(
    scenario: Scenario, plain: Scenario | None, name: str, chart: Path | None, console: Console
) -> dict[str, Any]:
    """Run and show a scenario, next to a plain one if there is one."""
    from kvreclaim.sim.report import report

    reports = {} if plain is None else {WHOLE: report(plain)}
    reports[name] = report(scenario)
    _show(reports, console)
    if chart is not None:
        from kvreclaim.sim.report import chart as draw

        draw(reports, chart)
    others = {each: found for each, found in reports.items() if each != name}
    return reports[name] | ({"beside": others} if others else {})


def _show(reports: dict[str, dict[str, Any]], console: Console) -> None:
    first = next(iter(reports.values()))
    table = Table(title=f"{first['trace']}: {first['requests']:,} requests, {first['replicas']} x replica")
    table.add_column("", no_wrap=True)
    for name in reports:
        table.add_column(name, justify="right")
    for label, cell in _LINES.items():
        table.add_row(label, *(escape(cell(report)) for report in reports.values()))
    console.print(table)
    for note in _notes(first):
        console.print(note, style="dim")


def _times(name: str, scale: float = 1.0) -> Any:
    def cell(report: dict[str, Any]) -> str:
        found = report[name]
        bands = (report["bands"] or {}).get(name)
        if not found:
            return UNDEFINED
        numbers = " / ".join(f"{found[key] * scale:.3g}" for key in ("mean", "p50", "p90", "p99"))
        if bands:
            low, high = bands["p99"]
            numbers += f" [{low * scale:.3g} to {high * scale:.3g}]"
        return numbers

    return cell


def _hit_rate(report: dict[str, Any]) -> str:
    if report["hit_rate"] is None:
        return "unknown: the trace does not tell"
    missed = ", ".join(
        f"{why} {count / report['prompt_tokens']:.3f}" for why, count in report["misses"].items()
    )
    return f"{report['hit_rate']:.4f} (missed: {missed})"


def _money(report: dict[str, Any]) -> str:
    money = report["money"]
    if money is None:
        return UNDEFINED
    output, every = money["per_million_output_tokens"], money["per_million_tokens"]
    return f"{_number(output, form='.3f')} / {_number(every, form='.4f')}"


def _goodput(report: dict[str, Any]) -> str:
    good = report["goodput"]
    if good is None:
        return UNDEFINED
    return f"{_number(good['requests_per_s'], form='.3f')} a second, {good['share']:.2%}"


def _preempted(report: dict[str, Any]) -> str:
    reasons = ", ".join(f"{why} {count:,}" for why, count in report["preemptions_by_reason"].items())
    more = f" ({reasons}); {report['swaps']:,} swapped" if reasons else ""
    return f"{report['preemptions']:,}{more}"


def _refused(report: dict[str, Any]) -> str:
    reasons = "; ".join(f"{why}: {count:,}" for why, count in report["refused_by_reason"].items())
    return f"{report['refused']:,}" + (f" ({reasons})" if reasons else "")


_LINES = {
    "to first token, s: mean / p50 / p90 / p99": _times("ttft_s"),
    "time between tokens, ms": _times("tpot_s", 1000),
    "end to end, s": _times("e2e_s"),
    "in the queue, s": _times("queue_s"),
    "requests that kept the targets": _goodput,
    "prompt tokens found": _hit_rate,
    "preemptions": _preempted,
    "tokens computed again": lambda report: f"{report['recomputed_tokens']:,}",
    "blocks freed by compression": lambda report: f"{report['blocks_freed']:,}",
    "peak blocks": lambda report: f"{report['peak_blocks']:,} of {report['num_blocks']:,}",
    "steps": lambda report: f"{report['steps']:,}",
    "running, mean over steps": lambda report: f"{report['mean_running']:.2f}",
    "offered load over capacity": lambda report: f"{report['utilisation']:.2f}",
    "$ a million tokens: output / all": _money,
    "refused": _refused,
    "simulated requests a minute": lambda report: _number(
        report["simulated_requests_per_min_per_core"], form=",.0f"
    ),
}


def _notes(report: dict[str, Any]) -> list[str]:
    facts = report["cost_model"]
    notes = [f"step times: {facts.get('kind', 'calibrated')}, {facts.get('error', 'no error is known')}."]
    if report["bands"]:
        notes.append(
            "The load is near what the replicas can do, or beyond: [p99 where a step's base and reading keys "
            "take 10 % less and more]."
        )
    notes.append(
        "Time between tokens: (end - first token) / (tokens - 1). HTTP, tokenizer and network are not in it."
    )
    if report["passes"] and not report["pass_s"]:
        notes.append("Passes of the compression take no time here: calibrate to have them priced.")
    if report["passes"]:
        notes.append("What is lost of the answers' quality is not simulated: `kvreclaim eval` measures it.")
    return notes


def _show_search(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{found['axis']}: what was tried")
    for heading in ("value", "kept", "ttft p99, s", "tpot p99, ms", "e2e p99, s", "why not"):
        table.add_column(heading, justify="left" if heading == "why not" else "right")
    for row in found["tried"]:
        table.add_row(
            f"{row['value']:g}",
            "yes" if row["kept"] else "no",
            _number(row["ttft_p99_s"]),
            _number(row["tpot_p99_s"], 1000),
            _number(row["e2e_p99_s"]),
            row["why_not"],
        )
    console.print(table)
    best = found["best"]
    console.print(
        f"{found['axis']}: none; {found['why_none']}" if best is None else f"{found['axis']}: {best:g}"
    )


def _number(value: float | None, scale: float = 1.0, form: str = ".4g") -> str:
    return UNDEFINED if value is None else f"{value * scale:{form}}"
