"""A project as Dagster assets and checks: an op per step, and a check that blocks holds up everything downstream.

Every blocking check is an op of its own, since a failed check holds up only other ops.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from isthmus.orchestration.graph.automation import contents, new, sensors
from isthmus.orchestration.graph.nodes import Graph
from isthmus.orchestration.graph.outline import Outline, outline
from isthmus.orchestration.graph.resource import IsthmusResource, Steps
from isthmus.orchestration.graph.steps import STEPS, Step
from isthmus.orchestration.graph.translator import IsthmusTranslator

RESOURCE = "isthmus"
_PRIORITIES = {"serve": "2", "engine": "1", "train": "0"}


def build_definitions(
    project: Path | str | Outline, *, translator: IsthmusTranslator | None = None, resource: Steps | None = None
) -> dg.Definitions:
    """The complete graph of a project: sources, tables, models, packages, deployments, their checks, and automation.

    Args:
        project: its folder, or its outline.
        translator: turns nodes into asset specs.
        resource: runs the steps; by default each in its own process.

    Raises:
        ConfigurationError: the project cannot be compiled.
        DagsterInvalidDefinitionError: two nodes have the same key, or assets depend on themselves.
    """
    graph = Graph(project if isinstance(project, Outline) else outline(Path(project).resolve()), translator)
    assets: list[Any] = [_sources(graph)]
    checks: list[dg.AssetChecksDefinition] = []
    for name, step in STEPS.items():
        for op, nodes in _ops(graph, name, step):
            if step.checks:
                checks.append(_checks(graph, op, name, nodes))
            else:
                assets.append(_assets(graph, op, name, nodes))
    return dg.Definitions(
        assets=assets,
        asset_checks=checks,
        sensors=sensors(graph.outline, _source_keys(graph)),
        resources={RESOURCE: resource or IsthmusResource(project=graph.outline.root)},
        # One process is enough: a step that needs memory or time has its own.
        executor=dg.in_process_executor,
    )


def _ops(graph: Graph, name: str, step: Step) -> Iterator[tuple[str, list[str]]]:
    """Name and nodes of each op of a step: a single op for all views, or an op for each model."""
    op, nodes = step.op or name.replace("-", "_"), [graph.nodes[node] for node in graph.of(*step.kinds)]
    if name == "attribute":
        nodes = [node for node in nodes if node.model is not None and node.model.bounded]
    if name == "monitor":
        nodes = [node for node in nodes if node.model is not None and node.model.monitored]
    by_model: dict[str, list[str]] = {}
    for node in nodes:
        if node.model is not None:
            by_model.setdefault(node.model.name, []).append(node.id)
    if by_model:
        for model, ids in by_model.items():
            yield f"{model.replace('-', '_')}_{op}", ids
        return
    if name == "check-drift":
        nodes = [node for node in nodes if any(node.name in model.views for model in graph.outline.models)]
    if nodes:
        yield op, [node.id for node in nodes]


def _source_keys(graph: Graph) -> dict[str, dg.AssetKey]:
    return {graph.nodes[node].name: graph.key(node) for node in graph.of("source")}


def _sources(graph: Graph) -> dg.AssetsDefinition:
    nodes = graph.of("source")
    with warnings.catch_warnings():
        # Observing several sources in one function is still in beta.
        warnings.simplefilter("ignore", dg.BetaWarning)

        observed: Callable[[Callable[..., Any]], dg.AssetsDefinition] = dg.multi_observable_source_asset(
            name="look", specs=[graph.specs[node] for node in nodes], can_subset=True
        )

        @observed
        def look(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
            versions = contents(graph.outline)
            for node in nodes:
                version = versions.get(graph.nodes[node].name)
                if version is not None and graph.key(node) in context.selected_asset_keys:
                    yield dg.ObserveResult(asset_key=graph.key(node), data_version=dg.DataVersion(version))

    return look


def observe(instance: dg.DagsterInstance, project: Path) -> None:
    """Records the current content of a project's sources, so that the first build starts from known content."""
    graph = Graph(outline(project.resolve()))
    for event in new(instance, graph.outline, _source_keys(graph)):
        instance.report_runless_asset_event(event)


def _assets(graph: Graph, op: str, name: str, nodes: Sequence[str]) -> dg.AssetsDefinition:
    step, days = STEPS[name], graph.outline.days
    partitions = None
    if name == "build" and days is not None:
        partitions = dg.DailyPartitionsDefinition(start_date=days[0], end_date=days[1], end_offset=0 if days[1] else 1)
    # Without daily partitions, there is no table to complete: a build builds it.
    name = "build" if name == "whole" and days is None else name

    @dg.multi_asset(
        name=op,
        specs=[graph.specs[node].replace_attributes(skippable=step.divisible) for node in nodes],
        can_subset=step.divisible and len(nodes) > 1,
        partitions_def=partitions,
        backfill_policy=None if partitions is None else dg.BackfillPolicy.single_run(),
        pool=step.pool,
        op_tags=_tags(name),
    )
    def run(context: dg.AssetExecutionContext, isthmus: IsthmusResource) -> Iterator[dg.MaterializeResult[None]]:
        yield from isthmus.run(context, name, graph.named)  # type: ignore[misc]

    return run


def _checks(graph: Graph, op: str, name: str, nodes: Sequence[str]) -> dg.AssetChecksDefinition:
    step = STEPS[name]
    # A verdict compares what is online and what devices keep, so it waits for both.
    deps = [graph.key(node) for node in graph.of("online", "snapshot")] if name == "verify" else []
    when: Any = None if step.cron is None else dg.AutomationCondition.cron_tick_passed(step.cron)
    specs = [
        dg.AssetCheckSpec(
            check,
            asset=graph.key(node),
            blocking=step.blocking,
            description=description,
            additional_deps=deps,
            automation_condition=when,
        )
        for node in nodes
        for check, description in step.checks.items()
    ]

    @dg.multi_asset_check(name=op, specs=specs, can_subset=len(specs) > 1, pool=step.pool, op_tags=_tags(name))
    def run(context: dg.AssetCheckExecutionContext, isthmus: IsthmusResource) -> Iterator[dg.AssetCheckResult]:
        yield from isthmus.run(context, name, graph.named)  # type: ignore[misc]

    return run


def _tags(name: str) -> dict[str, str]:
    return {"isthmus/step": name, "dagster/priority": _PRIORITIES[STEPS[name].pool]}
