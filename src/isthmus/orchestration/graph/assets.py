"""Dagster assets and checks of a project: one op per step.

Each blocking check has a separate op, because a failed check stops only the ops downstream of its op.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from isthmus.orchestration.graph.automation import new_observations, sensors, source_versions
from isthmus.orchestration.graph.nodes import AssetGraph
from isthmus.orchestration.graph.outline import Outline, outline
from isthmus.orchestration.graph.resource import IsthmusResource, StepRunner
from isthmus.orchestration.graph.steps import STEPS, StepSpec
from isthmus.orchestration.graph.translator import IsthmusTranslator

RESOURCE = "isthmus"
_PRIORITIES = {"serve": "2", "engine": "1", "train": "0"}


def build_definitions(
    project: Path | str | Outline, *, translator: IsthmusTranslator | None = None, resource: StepRunner | None = None
) -> dg.Definitions:
    """Return all Dagster definitions of a project: assets, checks, sensors and the resource that runs steps.

    Args:
        project: folder of the project, or its outline.
        translator: maps nodes to asset specs.
        resource: runs the steps; by default each step runs in a separate process.

    Raises:
        ConfigurationError: the project cannot be compiled.
        DagsterInvalidDefinitionError: two nodes have the same asset key, or assets depend on each other in a cycle.
    """
    graph = AssetGraph(project if isinstance(project, Outline) else outline(Path(project).resolve()), translator)
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
        # Steps start their own processes, so the executor does not have to.
        executor=dg.in_process_executor,
    )


def _ops(graph: AssetGraph, name: str, step: StepSpec) -> Iterator[tuple[str, list[str]]]:
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


def _source_keys(graph: AssetGraph) -> dict[str, dg.AssetKey]:
    return {graph.nodes[node].name: graph.key(node) for node in graph.of("source")}


def _sources(graph: AssetGraph) -> dg.AssetsDefinition:
    nodes = graph.of("source")
    with warnings.catch_warnings():
        # Observing several sources in one function is still in beta.
        warnings.simplefilter("ignore", dg.BetaWarning)

        observed: Callable[[Callable[..., Any]], dg.AssetsDefinition] = dg.multi_observable_source_asset(
            name="look", specs=[graph.specs[node] for node in nodes], can_subset=True
        )

        @observed
        def look(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
            versions = source_versions(graph.outline)
            for node in nodes:
                version = versions.get(graph.nodes[node].name)
                if version is not None and graph.key(node) in context.selected_asset_keys:
                    yield dg.ObserveResult(asset_key=graph.key(node), data_version=dg.DataVersion(version))

    return look


def observe(instance: dg.DagsterInstance, project: Path) -> None:
    """Record the current version of each source, so that only later changes trigger builds."""
    graph = AssetGraph(outline(project.resolve()))
    for event in new_observations(instance, graph.outline, _source_keys(graph)):
        instance.report_runless_asset_event(event)


def _assets(graph: AssetGraph, op: str, name: str, nodes: Sequence[str]) -> dg.AssetsDefinition:
    step, days = STEPS[name], graph.outline.days
    partitions = None
    if name == "build" and days is not None:
        partitions = dg.DailyPartitionsDefinition(start_date=days[0], end_date=days[1], end_offset=0 if days[1] else 1)
    # Without daily partitions, the step that completes a table must build it.
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


def _checks(graph: AssetGraph, op: str, name: str, nodes: Sequence[str]) -> dg.AssetChecksDefinition:
    step = STEPS[name]
    # The verdict compares online rows and snapshots, so it waits for both.
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
