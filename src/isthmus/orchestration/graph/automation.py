"""Automation: one sensor observes new raw data, another materializes the assets downstream of it."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import dagster as dg

from isthmus.orchestration.graph.outline import Outline

_SECONDS = 30
_VERSION = "dagster/data_version"


def sensors(outline: Outline, sources: Mapping[str, dg.AssetKey]) -> list[dg.SensorDefinition]:
    """Return both sensors. `sources` are asset keys by source name.

    With `[orchestration] automation` off, the sensors are stopped and can be started in the UI.
    """
    status = dg.DefaultSensorStatus.RUNNING if outline.automation else dg.DefaultSensorStatus.STOPPED
    follow = dg.AutomationConditionSensorDefinition(
        "automation", target=dg.AssetSelection.all(), default_status=status, minimum_interval_seconds=_SECONDS
    )

    @dg.sensor(
        name="sources", description="Observes new raw data.", default_status=status, minimum_interval_seconds=_SECONDS
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return dg.SensorResult(asset_events=new_observations(context.instance, outline, sources))

    return [look, follow]


def new_observations(
    instance: dg.DagsterInstance, outline: Outline, sources: Mapping[str, dg.AssetKey]
) -> list[dg.AssetObservation]:
    """Return an observation for each source that changed since its last observation in the instance."""
    observations = []
    for name, version in source_versions(outline).items():
        records = instance.fetch_observations(sources[name], limit=1).records
        last = records[0].asset_observation if records else None
        if last is None or last.tags.get(_VERSION) != version:
            observations.append(dg.AssetObservation(sources[name], tags={_VERSION: version}))
    return observations


def source_versions(outline: Outline) -> dict[str, str]:
    """Map source names to a version of their content. Sources without a known version are left out."""
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
