"""What is made again by itself, and when."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

from isthmus.orchestration.graph.outline import Outline

if TYPE_CHECKING:
    pass

_SECONDS = 30
_VERSION = "dagster/data_version"


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
    from isthmus.features.definition.spec import Source
    from isthmus.features.errors import IsthmusError
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
