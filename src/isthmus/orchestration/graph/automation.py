"""What is made again by itself, and when."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from isthmus.orchestration.graph.outline import Outline

if TYPE_CHECKING:
    from isthmus.orchestration.graph.translator import Node

_FOLLOWING = {"offline", "online", "teacher", "teacher_outputs", "student", "control", "package", "deployment"}
_SECONDS = 30
_VERSION = "dagster/data_version"


def condition(node: "Node") -> dg.AutomationCondition[Any] | None:
    """When a node is made again: once there is something new for it, if it has been made before.

    Models are trained again when the project says so, or when what they are fed has drifted from what they learned;
    from the training set on everything follows.
    """
    of = dg.AutomationCondition
    ready = ~of.missing() & ~of.in_progress() & ~of.any_deps_in_progress() & of.all_deps_blocking_checks_passed()
    if node.kind in _FOLLOWING:
        updated = of.any_deps_updated()
        if node.kind == "deployment":
            # New rows are no new package: what is deployed answers from them, and the verdict is on those before.
            updated = updated.ignore(dg.AssetSelection.kind("redis"))
        return (updated.since_last_handled() & ready).with_label("something new below it")
    if node.kind == "training_set":
        # Of the checks of what they are fed, drift alone blocks nothing. Each dependency is asked by itself: checks of
        # others come and go with every build, and would make an old drift newly true.
        failed, blocking = (of.any_checks_match(of.check_failed(), blocking_only=only) for only in (False, True))
        drifted = of.any_deps_match(failed & ~blocking)
        due: dg.AutomationCondition[Any] = drifted.newly_true()
        if node.outline.retrain is not None:
            due = due | of.cron_tick_passed(node.outline.retrain)
        return (due.since_last_handled() & ready).with_label("drift or schedule")
    return None


def sensors(outline: Outline, sources: Mapping[str, dg.AssetKey]) -> list[dg.SensorDefinition]:
    """The sensors of a project: one looks whether sources have changed, one makes again what depends on it.

    Both run unless `[orchestration] automation` says no: then they can be switched on in the page.

    Args:
        outline: the project.
        sources: name to key.
    """
    status = dg.DefaultSensorStatus.RUNNING if outline.automation else dg.DefaultSensorStatus.STOPPED
    follow = dg.AutomationConditionSensorDefinition(
        "automation", target=dg.AssetSelection.all(), default_status=status, minimum_interval_seconds=_SECONDS
    )

    @dg.sensor(
        name="sources",
        description="Sees new raw data.",
        default_status=status,
        minimum_interval_seconds=_SECONDS,
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return dg.SensorResult(asset_events=new(context.instance, outline, sources))

    return [look, follow]


def new(
    instance: dg.DagsterInstance, outline: Outline, sources: Mapping[str, dg.AssetKey]
) -> list[dg.AssetObservation]:
    """Observations of the sources whose content is another than was observed last.

    Args:
        instance: that knows what was observed.
        outline: the project.
        sources: name to key.
    """
    found = []
    for name, version in contents(outline).items():
        seen = instance.fetch_observations(sources[name], limit=1).records
        last = seen[0].asset_observation if seen else None
        if last is None or last.tags.get(_VERSION) != version:
            found.append(dg.AssetObservation(sources[name], tags={_VERSION: version}))
    return found


def contents(outline: Outline) -> dict[str, str]:
    """What tells today's content of each source from what it held before; sources elsewhere are left out."""
    from isthmus.features.errors import IsthmusError
    from isthmus.features.spec import Source
    from isthmus.transforms.sources import content

    found: dict[str, str] = {}
    for source in outline.sources:
        try:
            version = content(Source(source.name, path=source.path), Path(outline.root))
        except (IsthmusError, OSError):
            # It is not there at this moment: who reads it says so.
            continue
        if version is not None:
            found[source.name] = version
    return found
