"""A project as Dagster assets and checks: each runs one step, and what fails a blocking check stops what follows.

Every blocking check is an op of its own: a failing check stops what is downstream only across ops.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from isthmus.orchestration.graph.automation import contents, new, sensors
from isthmus.orchestration.graph.events import DRIFT
from isthmus.orchestration.graph.nodes import Graph
from isthmus.orchestration.graph.outline import Outline, outline
from isthmus.orchestration.graph.resource import IsthmusResource, Steps
from isthmus.orchestration.graph.translator import IsthmusTranslator

RESOURCE = "isthmus"
_POOLS = {
    "apply": "engine",
    "build": "engine",
    "whole": "engine",
    "check-tables": "engine",
    "check-drift": "engine",
    "training-set": "engine",
    "check-examples": "engine",
    "distill": "train",
    "check-student": "train",
    "export": "train",
    "materialize": "serve",
    "verify": "serve",
    "deploy": "serve",
}
_PRIORITIES = {"serve": "2", "engine": "1", "train": "0"}


def build_definitions(
    project: Path | str | Outline,
    *,
    translator: IsthmusTranslator | None = None,
    resource: Steps | None = None,
) -> dg.Definitions:
    """The whole graph of a project: sources, tables, models, packages, deployments, their checks, and automation.

    Args:
        project: its folder, or its outline.
        translator: what nodes are in Dagster.
        resource: what runs the steps; by default each in a process of its own.

    Raises:
        ConfigurationError: the project cannot be compiled.
        DagsterInvalidDefinitionError: the translator gives one key to several nodes, or makes a circle of them.
    """
    found = project if isinstance(project, Outline) else outline(Path(project).resolve())
    graph = Graph(found, translator)
    views, models = [view.name for view in found.views], [model.name for model in found.models]
    assets: list[Any] = [_sources(graph), _step(graph, "apply", "apply", ["contract"])]
    if found.days is not None:
        days = dg.DailyPartitionsDefinition(
            start_date=found.days[0], end_date=found.days[1], end_offset=0 if found.days[1] else 1
        )
        assets.append(_step(graph, "build_days", "build", graph.of("build"), days=days))
    assets.append(_step(graph, "build", "build" if found.days is None else "whole", graph.of("offline")))
    assets.append(_step(graph, "materialize", "materialize", graph.of("online")))
    promises = {
        "holds_its_contract": "The table can be read, was built under today's contract, and holds rows.",
        "meets_its_expectations": "The rows still hold what the view promises of them, in its `expectations`.",
    }
    checks: list[Any] = [
        _checks(graph, "check_tables", "check-tables", [f"offline/{view}" for view in views], promises),
    ]
    if models:
        drift = {DRIFT: "New rows are like those that the models learned from."}
        used = [f"offline/{view}" for view in views if any(view in model.views for model in found.models)]
        checks.append(_checks(graph, "check_drift", "check-drift", used, drift, blocking=False))
    for name in models:
        op = name.replace("-", "_")
        assets += [
            _step(graph, f"{op}_training_set", "training-set", [f"training_set/{name}"]),
            _step(
                graph, f"{op}_distill", "distill",
                [f"{kind}/{name}" for kind in ("teacher", "teacher_outputs", "student", "control")], subset=False,
            ),
            _step(graph, f"{op}_export", "export", [f"package/{name}"]),
            _step(graph, f"{op}_deploy", "deploy", [f"deployment/{name}"]),
        ]  # fmt: skip
        checks += [
            _checks(graph, f"{op}_check_examples", "check-examples", [f"training_set/{name}"],
                    {"loses_no_row": "As many rows came out of the join as went in."}),
            _checks(graph, f"{op}_check_student", "check-student", [f"student/{name}"],
                    {"keeps_its_quality": "Every gate that the distillation declares holds."}),
            _checks(graph, f"{op}_verify", "verify", [f"package/{name}"],
                    {"verdict": "What is offline, served, computed on request and seen by the package agrees."},
                    after=[f"online/{view}" for view in views]),
        ]  # fmt: skip
    # One process: what is heavy runs in processes of its own.
    return dg.Definitions(
        assets=assets,
        asset_checks=checks,
        sensors=sensors(found, {node.removeprefix("source/"): graph.key(node) for node in graph.of("source")}),
        resources={RESOURCE: resource or IsthmusResource(project=found.root)},
        executor=dg.in_process_executor,
    )


def _sources(graph: Graph) -> dg.AssetsDefinition:
    nodes = graph.of("source")
    with warnings.catch_warnings():
        # In beta: several sources that are observed by one function.
        warnings.simplefilter("ignore", dg.BetaWarning)

        observed: Callable[[Callable[..., Any]], dg.AssetsDefinition] = dg.multi_observable_source_asset(
            name="look", specs=[graph.spec(node) for node in nodes], can_subset=True
        )

        @observed
        def look(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
            found = contents(graph.outline)
            for node in nodes:
                version = found.get(graph.nodes[node].name)
                if version is not None and graph.key(node) in context.selected_asset_keys:
                    yield dg.ObserveResult(asset_key=graph.key(node), data_version=dg.DataVersion(version))

    return look


def observe(instance: dg.DagsterInstance, project: Path) -> None:
    """Notes what a project's sources hold now, so that its first build is one of known content.

    Args:
        instance: where it is noted.
        project: its folder.
    """
    graph = Graph(outline(project.resolve()))
    sources = {graph.nodes[node].name: graph.key(node) for node in graph.of("source")}
    for event in new(instance, graph.outline, sources):
        instance.report_runless_asset_event(event)


def _step(
    graph: Graph,
    name: str,
    step: str,
    nodes: Sequence[str],
    *,
    subset: bool = True,
    days: dg.DailyPartitionsDefinition | None = None,
) -> dg.AssetsDefinition:
    @dg.multi_asset(
        name=name,
        specs=[graph.spec(node).replace_attributes(skippable=subset) for node in nodes],
        can_subset=subset and len(nodes) > 1,
        partitions_def=days,
        backfill_policy=None if days is None else dg.BackfillPolicy.single_run(),
        pool=_POOLS[step],
        op_tags=_tags(step),
    )
    def run(context: dg.AssetExecutionContext, isthmus: IsthmusResource) -> Iterator[dg.MaterializeResult[None]]:
        yield from isthmus.run(context, step, graph.named)  # type: ignore[misc]

    return run


def _checks(
    graph: Graph,
    name: str,
    step: str,
    nodes: Sequence[str],
    promises: dict[str, str],
    *,
    blocking: bool = True,
    after: Iterable[str] = (),
) -> dg.AssetChecksDefinition:
    deps = [graph.key(node) for node in after]
    specs = [
        dg.AssetCheckSpec(check, asset=graph.key(node), blocking=blocking, description=told, additional_deps=deps)
        for node in nodes
        for check, told in promises.items()
    ]

    @dg.multi_asset_check(name=name, specs=specs, can_subset=len(specs) > 1, pool=_POOLS[step], op_tags=_tags(step))
    def run(context: dg.AssetCheckExecutionContext, isthmus: IsthmusResource) -> Iterator[dg.AssetCheckResult]:
        yield from isthmus.run(context, step, graph.named)  # type: ignore[misc]

    return run


def _tags(step: str) -> dict[str, str]:
    return {"isthmus/step": step, "dagster/priority": _PRIORITIES[_POOLS[step]]}
