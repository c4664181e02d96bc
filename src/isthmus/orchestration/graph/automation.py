"""What runs by itself: a sensor looks for new raw data, and another materializes what depends on it."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import dagster as dg

from isthmus.orchestration.graph.outline import Outline

_SECONDS = 30
_VERSION = "dagster/data_version"


def sensors(outline: Outline, sources: Mapping[str, dg.AssetKey]) -> list[dg.SensorDefinition]:
    """The sensors of a project, whose `sources` have these asset keys by name.

    Both run unless `[orchestration] automation` is off: then they can be switched on in the UI.
    """
    status = dg.DefaultSensorStatus.RUNNING if outline.automation else dg.DefaultSensorStatus.STOPPED
    follow = dg.AutomationConditionSensorDefinition(
        "automation", target=dg.AssetSelection.all(), default_status=status, minimum_interval_seconds=_SECONDS
    )

    @dg.sensor(
        name="sources", description="Sees new raw data.", default_status=status, minimum_interval_seconds=_SECONDS
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return dg.SensorResult(asset_events=new(context.instance, outline, sources))

    return [look, follow]


def new(
    instance: dg.DagsterInstance, outline: Outline, sources: Mapping[str, dg.AssetKey]
) -> list[dg.AssetObservation]:
    """Observations of the sources whose content has changed since the last observation in the instance."""
    observations = []
    for name, version in contents(outline).items():
        records = instance.fetch_observations(sources[name], limit=1).records
        last = records[0].asset_observation if records else None
        if last is None or last.tags.get(_VERSION) != version:
            observations.append(dg.AssetObservation(sources[name], tags={_VERSION: version}))
    return observations


def contents(outline: Outline) -> dict[str, str]:
    """Source name to a version of its content; those whose content cannot be known are left out."""
    from isthmus.features.errors import IsthmusError
    from isthmus.transforms.sources import content

    versions: dict[str, str] = {}
    for source in outline.sources:
        # If it is missing right now, the step that reads it will say so.
        with suppress(IsthmusError, OSError):
            version = content(source.declared, Path(outline.root), outline.storage_options)
            if version is not None:
                versions[source.name] = version
    return versions
