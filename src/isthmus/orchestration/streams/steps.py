"""Step that reads the streams of a project, where no `isthmus stream` runs all the time."""

import time
from collections.abc import Iterable, Mapping

from isthmus.features.projectstatus import STOPPED_SECONDS, StreamStatus
from isthmus.orchestration.steps.outline import Outline
from isthmus.orchestration.steps.step import Asset, Metadata, Results, Step, Work


def _stream(work: Work) -> Results:
    from isthmus.features.errors import RequestError
    from isthmus.orchestration.streams.stream import stream

    try:
        statuses = stream(work.project, once=True, say=lambda text: work.progress(text, 0.0))
    except RequestError:
        # Another process reads the streams.
        statuses = StreamStatus.read_all(work.project.state)
        if not statuses or not running(statuses, statuses):
            raise
    yield version_of(statuses), {**work.metadata({}), **figures(statuses)}


def running(statuses: Mapping[str, StreamStatus], sources: Iterable[str]) -> bool:
    """Return True if a process has written the state of all these sources in the last seconds."""
    now = time.time()
    return all(name in statuses and now - statuses[name].at / 1e6 < STOPPED_SECONDS for name in sources)


def version_of(statuses: Mapping[str, StreamStatus]) -> str:
    return " ".join(f"{name}:{status.watermark}:{status.late}" for name, status in sorted(statuses.items()))


def figures(statuses: Mapping[str, StreamStatus]) -> Metadata:
    """Return the state of streams as metadata of an asset: numbers that Dagster plots. Ages are in seconds."""
    now, metadata = time.time(), Metadata()
    for name, status in sorted(statuses.items()):
        own: dict[str, float] = {f"lag of partition {partition}": lag for partition, lag in status.lag.items()}
        own |= {"late events": status.late, "unreadable events": status.unreadable}
        own |= {"events/s": status.events_per_second}
        own |= {f"age of the newest row of {view}": round(now - at / 1e6, 1) for view, at in status.newest.items()}
        metadata |= {f"{name}: {title}": value for title, value in own.items()}
        metadata[f"{name}: watermark"] = {"raw_value": status.watermark / 1e6, "type": "timestamp"}
    return metadata


EVENTS = Asset(
    "events", Outline, lambda _project: "The events of all streams, and the rows that follow them.",
    library="kafka", follows=False,
)  # fmt: skip
STEPS = (Step("stream", "serve", _stream, (EVENTS,), select=lambda node: bool(node.outline.streams)),)
