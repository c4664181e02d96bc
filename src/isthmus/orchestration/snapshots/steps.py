"""Step that writes the files of stored features for devices."""

from isthmus.orchestration.steps.outline import SnapshotOutline
from isthmus.orchestration.steps.step import Asset, Results, Step, Work


def _snapshot(work: Work) -> Results:
    from isthmus.orchestration.snapshots.create import snapshot

    written = snapshot(work.project, work.name, progress=work.progress)
    rows = {"dagster/row_count": sum(written.rows.values())}
    yield written.snapshot, rows | work.metadata(written.as_dict(), ["bytes"])


SNAPSHOT = Asset(
    "snapshot", SnapshotOutline, lambda _snapshot: "The stored features for devices, as a signed file.",
    library="file", version=lambda snapshot: snapshot.code,
    deps=lambda snapshot: map("offline/{}".format, snapshot.views),
)  # fmt: skip
STEPS = (Step("snapshot", "serve", _snapshot, (SNAPSHOT,)),)
