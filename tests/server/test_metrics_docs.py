"""The metrics in the dashboard and the documents exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from kvreclaim.server.admin.logs import QUIET_ROUTES
from kvreclaim.server.metrics.catalogue import CATALOGUE, MetricKind, MetricSpec

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "observability"
DASHBOARD = EXAMPLE / "grafana" / "kvreclaim.json"
DOCS = (ROOT / "docs" / "observability.md").read_text()
SUFFIXES = ("_bucket", "_sum", "_count")
SELECTOR = re.compile(r"([a-z]+:[a-z0-9_]+)(?:\{([^}]*)\})?")


def exported_name(metric: MetricSpec) -> str:
    """Name in the text format, where a histogram's samples also end in one of SUFFIXES."""
    return f"{metric.name}_total" if metric.kind is MetricKind.COUNTER else metric.name


EXPORTED = {
    name: metric
    for metric in CATALOGUE
    for name in (
        [metric.name + suffix for suffix in SUFFIXES]
        if metric.kind is MetricKind.HISTOGRAM
        else [exported_name(metric)]
    )
}
"""Names of samples, as PromQL knows them."""


def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are() -> None:
    queries = [variable["definition"] for variable in dashboard()["templating"]["list"][1:]]
    assert len(expressions()) > 30
    for expression in [*expressions(), *queries]:
        found = SELECTOR.findall(expression)
        assert found, expression
        for name, selector in found:
            labels = set(re.findall(r"(\w+)=~?\"", selector))
            assert labels <= {*EXPORTED[name].labels, "instance"}, expression
        grouped = re.search(r"by \((\w+)\)", expression)
        if grouped and grouped[1] != "le":
            assert all(grouped[1] in EXPORTED[name].labels for name, _ in found), expression
    assert all(e.count("(") == e.count(")") for e in expressions())


def test_every_kvreclaim_metric_is_on_the_dashboard() -> None:
    shown = {EXPORTED[name] for expression in expressions() for name, _ in SELECTOR.findall(expression)}
    assert {metric for metric in CATALOGUE if metric.name.startswith("kvreclaim:")} <= shown


@pytest.mark.parametrize("name", ["kvreclaim", "vllm"])
def test_panels_are_whole_and_do_not_overlap(name: str) -> None:
    panels = json.loads((EXAMPLE / "grafana" / f"{name}.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert [t["refId"] for t in panel["targets"]] == [*"ABC"][: len(panel["targets"])]


def test_the_example_fits_together() -> None:
    compose = yaml.safe_load((EXAMPLE / "docker-compose.yaml").read_text())["services"]
    for service in compose.values():
        for volume in service.get("volumes", []):
            assert (EXAMPLE / volume.split(":")[0]).is_file(), volume
        assert not service["image"].endswith(":latest")
    [job] = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    [source] = yaml.safe_load((EXAMPLE / "grafana" / "datasources.yml").read_text())["datasources"]
    listens = next(each for each in compose["prometheus"]["command"] if "listen" in each)
    assert source["url"] == "http://" + listens.partition("=")[2]
    boards = {file: json.loads(file.read_text()) for file in (EXAMPLE / "grafana").glob("*.json")}
    assert len({board["uid"] for board in boards.values()}) == len(boards) == 2
    for file, board in boards.items():
        assert board["templating"]["list"][0]["current"]["value"] == source["uid"]
        assert any(volume.endswith(f"/{file.name}:ro") for volume in compose["grafana"]["volumes"])
    [provider] = yaml.safe_load((EXAMPLE / "grafana" / "dashboards.yml").read_text())["providers"]
    assert any(
        volume.split(":")[1].startswith(provider["options"]["path"])
        for volume in compose["grafana"]["volumes"]
    )


def row(metric: MetricSpec) -> str:
    labels = ",".join(label for label in metric.labels if label not in ("model_name", "engine"))
    return f"| `{exported_name(metric)}{f'{{{labels}}}' if labels else ''}` | {metric.meaning} |"


def test_the_table_in_the_docs_is_the_catalogue() -> None:
    expected = [row(metric) for metric in CATALOGUE]
    given = [line for line in DOCS.splitlines() if re.match(r"\| `(vllm:|kvreclaim:|http_)", line)]
    assert given == expected, "\n".join(expected)


@pytest.mark.parametrize("route", QUIET_ROUTES)
def test_quiet_routes_are_named(route: str) -> None:
    assert f"`{route}`" in DOCS
