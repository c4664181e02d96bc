"""Dagster assets, checks and sensors of a project: one op per step and model."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import dagster as dg

from isthmus.features.projectstatus import StreamStatus
from isthmus.orchestration.graph.outline import outline
from isthmus.orchestration.graph.resource import SHARE, IsthmusResource, StepRunner
from isthmus.orchestration.graph.steps import STEPS
from isthmus.orchestration.graph.translator import IsthmusTranslator
from isthmus.orchestration.steps.outline import ModelOutline, Outline, SnapshotOutline, ViewOutline
from isthmus.orchestration.steps.step import AssetNode, Kind, Pool, Step
from isthmus.orchestration.streams.steps import figures, running, version_of

RESOURCE = "isthmus"
_PRIORITIES: dict[Pool, str] = {"serve": "2", "engine": "1", "train": "0"}
_SECONDS = 30
_VERSION = "dagster/data_version"
_STREAM = "isthmus/stream"
_UNFINISHED = (dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED)


class AssetGraph:
    """Nodes of a project (the outline's assets), each after its dependencies, and the Dagster asset spec of each node.

    Raise DagsterInvalidDefinitionError if two nodes get the same key, or dependencies form a cycle.
    """

    def __init__(self, outline: Outline, translator: IsthmusTranslator | None = None) -> None:
        self.outline = outline
        self.nodes = _nodes(outline)
        translator = translator or IsthmusTranslator()
        specs = {name: translator.get_asset_spec(node) for name, node in self.nodes.items()}
        keys = {node: spec.key for node, spec in specs.items()}
        counts = Counter(keys.values())
        if shared := ", ".join(node for node, key in keys.items() if counts[key] > 1):
            raise dg.DagsterInvalidDefinitionError(
                f"the translator gives several nodes the same key: {shared}. Give each a unique key"
            )
        self.specs = {
            node: spec.replace_attributes(deps=[*spec.deps, *(keys[dep.id] for dep in self.nodes[node].deps)])
            for node, spec in specs.items()
        }
        try:
            TopologicalSorter(
                {spec.key: {dep.asset_key for dep in spec.deps} for spec in self.specs.values()}
            ).prepare()
        except CycleError as error:
            circle = " <- ".join(key.to_user_string() for key in reversed(error.args[1]))
            raise dg.DagsterInvalidDefinitionError(
                f"the translator adds dependencies that form a cycle: {circle}. Remove one of them"
            ) from None

    def key(self, node: str) -> dg.AssetKey:
        return self.specs[node].key

    def of(self, *kinds: Kind) -> Sequence[str]:
        return [node.id for node in self.nodes.values() if node.kind in kinds]

    @cached_property
    def named(self) -> Mapping[dg.AssetKey, str]:
        return {spec.key: node for node, spec in self.specs.items()}


def _nodes(outline: Outline) -> Mapping[str, AssetNode]:
    nodes = {node.id: node for node in (AssetNode("source", source.name, outline) for source in outline.sources)}
    for part in (outline, *outline.views, *outline.snapshots, *outline.models):
        for asset, select in ((asset, step.select) for step in STEPS.values() for asset in step.assets):
            if isinstance(part, asset.of):
                node = AssetNode(
                    asset.kind,
                    "" if isinstance(part, Outline) else part.name,
                    outline,
                    tuple(nodes[dep] for dep in asset.deps(part) if dep in nodes),
                    part if isinstance(part, ViewOutline) else None,
                    part if isinstance(part, ModelOutline) else None,
                    part if isinstance(part, SnapshotOutline) else None,
                )
                if select(node):
                    nodes[node.id] = node
    return nodes


def build_definitions(
    project: Path | str | Outline, *, translator: IsthmusTranslator | None = None, resource: StepRunner | None = None
) -> dg.Definitions:
    """Build the Dagster definitions of a project, to load it in a Dagster code location: assets, checks and sensors.

    Args:
        project: folder of the project, or the `Outline` that `outline` compiled from it. For a folder whose definitions
            have changed, `outline` is called first. It compiles the project in another process.
        translator: sets the names, groups and other attributes of the Dagster assets; an IsthmusTranslator by default.
        resource: runs the steps; by default each step runs in a separate process.

    Raises:
        ConfigurationError: the project cannot be compiled.
        DagsterInvalidDefinitionError: two nodes have the same asset key, or assets depend on each other in a cycle.
    """
    graph = AssetGraph(project if isinstance(project, Outline) else outline(Path(project).resolve()), translator)
    assets: list[Any] = [_sources(graph)]
    checks: list[dg.AssetChecksDefinition] = []
    for step in STEPS.values():
        for op, nodes in _ops(graph, step):
            # A failed blocking check stops only the ops downstream of its op, so checks are ops of their own.
            if step.checks:
                checks.append(_checks(graph, op, step, nodes))
            elif step.divides and graph.outline.parallel > 1:
                assets.append(_divided(graph, op, step, nodes))
            else:
                assets.append(_assets(graph, op, step, nodes))
    return dg.Definitions(
        assets=assets,
        asset_checks=checks,
        sensors=[*_sensors(graph.outline, _source_keys(graph)), *_stream_sensors(graph)],
        resources={RESOURCE: resource or IsthmusResource(project=graph.outline.root)},
        # Steps start their own processes, so the executor only has to if several run at once.
        executor=dg.in_process_executor
        if (parallel := graph.outline.parallel) == 1
        else dg.multiprocess_executor.configured({"max_concurrent": parallel}),
    )


def _ops(graph: AssetGraph, step: Step) -> Iterable[tuple[str, list[str]]]:
    name = step.op or step.name.replace("-", "_")
    ops: dict[str, list[str]] = {}
    for node in graph.nodes.values():
        if node.kind in step.kinds and step.select(node):
            op = name if node.model is None else f"{node.model.name.replace('-', '_')}_{name}"
            ops.setdefault(op, []).append(node.id)
    return ops.items()


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
            versions = _source_versions(graph.outline)
            for node in nodes:
                version = versions.get(graph.nodes[node].name)
                if version is not None and graph.key(node) in context.selected_asset_keys:
                    yield dg.ObserveResult(asset_key=graph.key(node), data_version=dg.DataVersion(version))

    return look


def record_source_versions(instance: dg.DagsterInstance, project: Path) -> None:
    graph = AssetGraph(outline(project.resolve()))
    for event in _new_observations(instance, graph.outline, _source_keys(graph)):
        instance.report_runless_asset_event(event)


def _assets(graph: AssetGraph, op: str, step: Step, nodes: Sequence[str]) -> dg.AssetsDefinition:
    days = graph.outline.days
    partitions = None
    if step.daily and days is not None:
        partitions = dg.DailyPartitionsDefinition(start_date=days[0], end_date=days[1], end_offset=0 if days[1] else 1)
    name = step.without_days if step.without_days and days is None else step.name

    @dg.multi_asset(
        name=op,
        specs=[graph.specs[node].replace_attributes(skippable=step.divisible) for node in nodes],
        can_subset=step.divisible and len(nodes) > 1,
        partitions_def=partitions,
        backfill_policy=None if partitions is None else dg.BackfillPolicy.single_run(),
        pool=step.pool,
        op_tags=_tags(name, step.pool),
    )
    def run(context: dg.AssetExecutionContext, isthmus: IsthmusResource) -> Iterator[dg.MaterializeResult[None]]:
        yield from isthmus.run(context, name, graph.named)  # type: ignore[misc]

    return run


def _divided(graph: AssetGraph, op: str, step: Step, nodes: Sequence[str]) -> dg.AssetsDefinition:
    """Return assets made by several ops: the parts of the work side by side, then the step, which reports."""
    specs, model, count = [graph.specs[node] for node in nodes], graph.nodes[nodes[0]].name, graph.outline.parallel
    own = {spec.key for spec in specs}
    outside = sorted({dep.asset_key for spec in specs for dep in spec.deps} - own)
    inputs, outputs = ({key.to_python_identifier(): key for key in keys} for keys in (outside, own))
    nothing = dg.In(dg.Nothing)

    def part(n: int) -> dg.OpDefinition:
        tags = {**_tags(step.divides, step.pool), SHARE: f"{n}/{count}/{model}"}

        @dg.op(
            name=f"{op}_part_{n}", ins=dict.fromkeys(inputs, nothing), out=dg.Out(dg.Nothing), pool=step.pool, tags=tags
        )
        def run(context: dg.AssetExecutionContext, isthmus: IsthmusResource) -> Iterator[dg.Output[None]]:
            list(isthmus.run(context, step.divides, graph.named))
            yield dg.Output(None)  # Pipes demands an output

        return run

    parts = [part(n) for n in range(count)]

    @dg.op(
        name=f"{op}_report", ins={of.name: nothing for of in parts}, out=dict.fromkeys(outputs, dg.Out(dg.Nothing)),
        pool=step.pool, tags=_tags(step.name, step.pool),
    )  # fmt: skip
    def report(context: dg.AssetExecutionContext, isthmus: IsthmusResource) -> Iterator[dg.MaterializeResult[None]]:
        yield from isthmus.run(context, step.name, graph.named)  # type: ignore[misc]

    divided = dg.GraphDefinition(
        op,
        node_defs=[*parts, report],
        dependencies={report.name: {of.name: dg.DependencyDefinition(of.name) for of in parts}},
        input_mappings=[
            dg.InputMapping(graph_input_name=name, mapped_node_name=of.name, mapped_node_input_name=name)
            for name in inputs
            for of in parts
        ],
        output_mappings=[dg.OutputMapping(name, report.name, name) for name in outputs],
    )
    return dg.AssetsDefinition(keys_by_input_name=inputs, keys_by_output_name=outputs, node_def=divided, specs=specs)


def _checks(graph: AssetGraph, op: str, step: Step, nodes: Sequence[str]) -> dg.AssetChecksDefinition:
    deps = [graph.key(node) for node in graph.of(*step.waits_for)]
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

    @dg.multi_asset_check(
        name=op, specs=specs, can_subset=len(specs) > 1, pool=step.pool, op_tags=_tags(step.name, step.pool)
    )
    def run(context: dg.AssetCheckExecutionContext, isthmus: IsthmusResource) -> Iterator[dg.AssetCheckResult]:
        yield from isthmus.run(context, step.name, graph.named)  # type: ignore[misc]

    return run


def _tags(step: str, pool: Pool) -> dict[str, str]:
    return {"isthmus/step": step, "dagster/priority": _PRIORITIES[pool]}


def _sensors(outline: Outline, sources: Mapping[str, dg.AssetKey]) -> list[dg.SensorDefinition]:
    """Return two sensors: one observes new source data, one starts runs when automation conditions are met.

    With `[orchestration] automation` off, both are stopped and can be started in the UI.
    """
    status = dg.DefaultSensorStatus.RUNNING if outline.automation else dg.DefaultSensorStatus.STOPPED
    follow = dg.AutomationConditionSensorDefinition(
        "automation", target=dg.AssetSelection.all(), default_status=status, minimum_interval_seconds=_SECONDS
    )

    @dg.sensor(
        name="sources", description="Observes new raw data.", default_status=status, minimum_interval_seconds=_SECONDS
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return dg.SensorResult(asset_events=_new_observations(context.instance, outline, sources))

    return [look, follow]


def _stream_sensors(graph: AssetGraph) -> list[dg.SensorDefinition]:
    """Return a sensor that reads the streams, or shows the state of the `isthmus stream` that reads them."""
    sources, state = graph.outline.streams, Path(graph.outline.root) / ".isthmus"
    if not sources:
        return []
    key = graph.key("events")

    @dg.sensor(
        name="streams", description="Reads new events, unless `isthmus stream` does.", target=[key],
        default_status=dg.DefaultSensorStatus.RUNNING if graph.outline.automation else dg.DefaultSensorStatus.STOPPED,
        minimum_interval_seconds=_SECONDS,
    )  # fmt: skip
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        statuses = StreamStatus.read_all(state)
        if running(statuses, sources):
            shown = dg.AssetMaterialization(
                key, metadata=_shown(figures(statuses)), tags={_VERSION: version_of(statuses)}
            )
            return dg.SensorResult(asset_events=[shown])
        unfinished = dg.RunsFilter(tags={_STREAM: "true"}, statuses=[*_UNFINISHED])
        if context.instance.get_runs_count(unfinished):
            return dg.SensorResult()
        return dg.SensorResult(run_requests=[dg.RunRequest(asset_selection=[key], tags={_STREAM: "true"})])

    return [look]


def _shown(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: dg.MetadataValue.timestamp(value["raw_value"]) if isinstance(value, Mapping) else value
        for name, value in metadata.items()
    }


def _new_observations(
    instance: dg.DagsterInstance, outline: Outline, sources: Mapping[str, dg.AssetKey]
) -> list[dg.AssetObservation]:
    observations = []
    for name, version in _source_versions(outline).items():
        records = instance.fetch_observations(sources[name], limit=1).records
        last = records[0].asset_observation if records else None
        if last is None or last.tags.get(_VERSION) != version:
            observations.append(dg.AssetObservation(sources[name], tags={_VERSION: version}))
    return observations


def _source_versions(outline: Outline) -> dict[str, str]:
    from isthmus.features.errors import IsthmusError
    from isthmus.transforms.sources import content

    versions: dict[str, str] = {}
    for source in outline.sources:
        # A missing source is reported by the step that reads it.
        with suppress(IsthmusError, OSError):
            version = content(source.declared, Path(outline.root), outline.storage_options)
            if version is not None:
                versions[source.name] = version
    return versions
