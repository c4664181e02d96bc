"""The asset of streamed events in Dagster, and the sensor that keeps it up to date."""

import time
from pathlib import Path
from typing import Any

import dagster as dg
import msgspec
import pytest

from isthmus.features.projectstatus import StreamStatus
from isthmus.orchestration.graph.assets import build_definitions
from isthmus.orchestration.project import Project
from tests.orchestration.streams.buses import Buses, as_json, shuffled, stops

EVENTS = stops(300)
ARCHIVE, LATER = EVENTS.slice(0, 100), EVENTS.slice(100)


@pytest.fixture
def buses(tmp_path: Path) -> Buses:
    made = Buses(tmp_path / "buses")
    made.write('FileStream("data/in")', ARCHIVE)
    lines = b"\n".join(value for _, value in as_json(shuffled(LATER)))
    (made.root / "data" / "in" / "1.jsonl").write_bytes(lines)
    return made


def evaluated(definitions: dg.Definitions, instance: dg.DagsterInstance) -> Any:
    repository = definitions.get_repository_def()
    with dg.build_sensor_context(instance=instance, repository_def=repository) as context:
        return repository.get_sensor_def("streams").evaluate_tick(context)


@pytest.mark.accept
def test_the_sensor_reads_the_stream_or_shows_who_reads_it(buses: Buses) -> None:
    project, definitions = Project(buses.root), build_definitions(buses.root)
    with dg.DagsterInstance.ephemeral() as instance:
        tick = evaluated(definitions, instance)
        assert [request.asset_selection for request in tick.run_requests] == [[dg.AssetKey(["events"])]]
        job = definitions.resolve_implicit_global_asset_job_def()
        done = job.execute_in_process(instance=instance, asset_selection=[dg.AssetKey(["events"])])
        assert done.success
        [event] = done.asset_materializations_for_node("stream")
        assert event.metadata["stops: unreadable events"].value == 0
        assert event.metadata["stops: lag of partition 1.jsonl"].value == 0 if LATER is None else True
        assert buses.rows() == buses.oracle(EVENTS)
        # Now a process reads the stream all the time.
        status = StreamStatus.read_all(project.state)["stops"]
        msgspec.structs.replace(status, at=int(time.time() * 1e6)).write(project.state, "stops")
        tick = evaluated(definitions, instance)
        assert not tick.run_requests
        [shown] = tick.asset_events
        assert shown.metadata["stops: late events"].value == status.late


def test_a_project_without_streams_has_no_such_asset(tmp_path: Path) -> None:
    plain = Buses(tmp_path / "plain")
    plain.write("None", ARCHIVE)
    repository = build_definitions(plain.root).get_repository_def()
    assert not any(sensor.name == "streams" for sensor in repository.sensor_defs)
    assert dg.AssetKey(["events"]) not in repository.asset_graph.get_all_asset_keys()
