"""Alert rules and the dashboard: parsed as Prometheus parses them, and held against what a server really exposes."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse_text

from isthmus.features.production import (
    Bound,
    InputDrift,
    MeasuredValue,
    PackageQuality,
    Production,
    SliceQuality,
    Week,
    production_file,
)
from isthmus.features.projectstatus import StreamStatus
from tests.serving.metrics.test_metrics import LOOKUP, PREDICT
from tests.serving.support import Server, make_package, wait

RULES = yaml.safe_load((files("isthmus.serving") / "prometheus" / "alerts.yaml").read_text())["groups"]
ALERTS: dict[str, Any] = {rule["alert"]: rule for group in RULES for rule in group["rules"]}
DASHBOARD = json.loads((files("isthmus.serving") / "grafana" / "isthmus.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

TARGET = {"job", "instance"}
"""Labels that Prometheus gives to what it scrapes; and `up`, which is its own, has no others."""

Series = Mapping[str, list[dict[str, str]]]


@dataclass
class Query:
    """The selectors of an expression, and the labels that it groups and matches by."""

    selectors: list[promql.VectorSelector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, text: str) -> "Query":
        query = cls()
        promql.walk(promql.parse(text.replace("$__rate_interval", "5m")), query._visit)
        return query

    def _visit(self, node: promql.Expr) -> None:
        match node:
            case promql.VectorSelector():
                self.selectors.append(node)
            case promql.AggregateExpr() if node.modifier:
                self.labels.update(node.modifier.labels)
            case promql.BinaryExpr() if node.modifier:
                self.labels.update(node.modifier.matching.labels if node.modifier.matching else [])
                self.labels.update(node.modifier.group_labels or [])

    @property
    def names(self) -> set[str]:
        return {selector.name for selector in self.selectors if selector.name and selector.name != "up"}


EXPRESSIONS = {name: rule["expr"] for name, rule in ALERTS.items()} | {
    f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]
}


def digest_of(server: Server) -> str:
    digest: str = server.http.get("/models").json()["models"][0]["package"]
    return digest


def quality(package: str, *slices: SliceQuality, broken: bool = True) -> Production:
    """As of `isthmus answers monitor`."""
    measures = {"auc": MeasuredValue(0.7, 0.6, 0.8), "brier": MeasuredValue(0.2)}
    found = PackageQuality(
        package=package, precision="fp32", first=0, last=1, answers=20, rows=10, measures=measures,
        weeks=(
            Week(week="2026-W47", answers=9, rows=5, measures={"auc": MeasuredValue(0.65)}),
            Week(week="2026-W48", answers=3, rows=0, measures={}),
        ),
        slices=slices or (SliceQuality(column="carrier", value="UA", answers=9, rows=5, measures=measures),),
        drift=(InputDrift(name="score", rows=20, psi=0.5, exceeded=("psi",)),),
    )  # fmt: skip
    bound = Bound(measure="auc", at_least=0.9, found=measures["auc"], broken=broken)
    return Production(
        model="late", metric="auc", higher_is_better=True, at=2, left_out={}, packages=(found,), bounds=(bound,)
    )


@pytest.fixture(scope="module")
def exposed(watched: Server) -> Series:
    """Name to the labels of each series of a server that has been through everything."""
    (watched.contract.parent / "production" / "late").mkdir(parents=True)
    production_file(watched.contract.parent, "late").write_bytes(quality(digest_of(watched)).dumps())
    stream = StreamStatus(at=1, watermark=1, late=0, unreadable=0, events=1, lag={"0": 3}, events_per_second=1.0,
                          rows={}, newest={})  # fmt: skip
    stream.write(watched.contract.parent, "flights")
    assert watched.lookup(**LOOKUP).status_code == 200
    watched.deploy(make_package(watched.contract.parent / "shadow", weight=-1.0), share=0.0)
    wait(lambda: "candidate" in watched.http.get("/models").json()["models"][0], "the shadow")
    assert watched.predict(**PREDICT).status_code == 200
    assert watched.predict(entities={"carrier": ["UA"]}, request={"distance": [1e300]}).status_code == 500
    assert watched.http.get("/invented").status_code == 404
    for route, status in (("/push", 422), ("/write-to-online-store", 422), ("/v2/models/late/infer", 404)):
        assert watched.http.post(route, json={}).status_code == status
    series: dict[str, list[dict[str, str]]] = {}
    for family in parse_text(watched.http.get("/metrics").text):
        for sample in family.samples:
            series.setdefault(sample.name, []).append(sample.labels)
    return series


def alternatives(matcher: promql.Matcher) -> Iterator[str]:
    """Patterns of the values that a matcher expects to be there."""
    if matcher.op == promql.MatchOp.Equal:
        yield re.escape(matcher.value)
    if matcher.op == promql.MatchOp.Re and "$" not in matcher.value:
        yield from matcher.value.split("|")


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_every_expression_parses_and_asks_for_what_there_is(exposed: Series, where: str) -> None:
    query = Query.of(EXPRESSIONS[where])
    known = set(TARGET)
    for selector in query.selectors:
        name = selector.name
        if name is None or name == "up":
            continue
        assert name in exposed
        series = exposed[name]
        labels = TARGET.union(*series)
        known |= labels
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels
            if matcher.name not in TARGET:
                values = {own.get(matcher.name) for own in series}
                for pattern in alternatives(matcher):
                    there = any(re.fullmatch(pattern, value or "") for value in values)
                    assert there, f"no series of {name} has {matcher}"
    assert query.labels <= known


def test_a_parser_of_prometheus_refuses_what_is_wrong() -> None:
    for wrong in ("sum by (view (x)", "rate(x)", "x > on () group_left", "x{view=}"):
        with pytest.raises(ValueError, match=r"."):
            promql.parse(wrong)


def test_every_alert_says_how_bad_it_is_how_long_it_waits_and_what_to_do() -> None:
    assert len(ALERTS) == sum(len(group["rules"]) for group in RULES)
    for name, rule in ALERTS.items():
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}, name
        assert promql.parse_duration(rule["for"]).total_seconds() >= 60
        assert rule["labels"].keys() == {"severity"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}
        # A label that the expression has aggregated away would be an empty text.
        said = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        query = Query.of(rule["expr"])
        assert said <= query.labels | (TARGET if not query.labels else set()), name


def test_the_documentation_lists_every_alert() -> None:
    page = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|$", page, re.MULTILINE))
    assert listed == {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}


def test_the_dashboard_shows_all_there_is(exposed: Series) -> None:
    asked = set[str]().union(*(Query.of(target["expr"]).names for panel in PANELS for target in panel["targets"]))
    assert all(name.startswith("isthmus_") for name in exposed)

    def stem(name: str) -> str:
        """A histogram is asked for by one of its parts."""
        return re.sub(r"_(bucket|count|sum)$", "", name)

    assert {stem(name) for name in exposed} == {stem(name) for name in asked}


def test_the_dashboard_is_whole() -> None:
    source, *variables = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    for used in [*PANELS, *variables, *(target for panel in PANELS for target in panel["targets"])]:
        assert used["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken)
