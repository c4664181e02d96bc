"""Answers that are recorded without a server: of the shop's orders, or of anything else."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.features import clock
from isthmus.features.offline.store import OfflineStore
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.storedrows import from_history
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.orchestration.server.secret import read_or_create_secret
from isthmus.package.manifest import open_package
from isthmus.serving.recorder.batch import ANSWER, AnswerBatch, AnswerGroup, StoredViewRows
from isthmus.serving.recorder.columns import hashes

HOUR = 3_600_000_000
DAY = 24 * HOUR
COLUMNS = ("customer", "store", "product", "hour", "weight")
RUN = "abcdef012345"


def digest(project: Project) -> str:
    """Of the last package."""
    return open_package(Artifacts.of(project).last_package()).files.digest


def orders(project: Project) -> pa.Table:
    """The shop's orders, with the request fields and the times of the spine in microseconds."""
    rows = pq.read_table(project.root / "data" / "orders.parquet")
    ordered, delivered = (rows[name].cast(pa.int64()).to_numpy() for name in ("ordered_at", "delivered_at"))
    rows = rows.append_column("hour", pa.array(ordered // HOUR % 24))
    return rows.append_column("event", pa.array(ordered)).append_column("known", pa.array(delivered))


def _stored(project: Project, rows: pa.Table, at: np.ndarray[Any, Any]) -> Iterator[StoredViewRows]:
    """What Redis would have given at these moments."""
    contract = project.applied()
    for name in dict.fromkeys(
        view for view, _ in contract.stored_features(Artifacts.of(project).declared.student.name)
    ):
        view = contract.views[name]
        keys = {column.name: rows[column.name].to_pylist() for column in view.keys}
        stored = from_history(OfflineStore(project.offline).history(view), view, keys, at)
        content, event, known = (
            part.astype(np.int64).tobytes() for part in (stored.content, stored.event, stored.known)
        )
        yield StoredViewRows(name, view.hash, content, event, known, stored.status.astype(np.uint8).tobytes())


def record(
    project: Project, rows: pa.Table, scores: Any, at: Any, *, package: str | None = None, number: int = 1,
    run: str = RUN, columns: Sequence[str] = COLUMNS, start: int = 0, hashed: tuple[str, ...] = (),
    caller: str = "",
) -> None:  # fmt: skip
    """A batch of answers of a row each, in this order."""
    count = len(rows)
    lists = {name: rows[name].to_pylist() for name in columns}
    for name in hashed:
        column = project.applied().views["shelf_demand"].keys[["store", "product"].index(name)]
        lists[name] = hashes(read_or_create_secret(project), column, lists[name])
    bodies = [
        json.dumps({
            "entities": {"store": [lists["store"][n]], "product": [lists["product"][n]]} if "store" in lists else {},
            "request": {name: [lists[name][n]] for name in columns if name not in ("store", "product", "customer")},
        }).encode()
        for n in range(count)
    ]  # fmt: skip
    records = np.zeros(count, ANSWER)
    records["sequence"], records["at"], records["rows"] = np.arange(count) + 1 + start, at, 1
    records["length"] = [*map(len, bodies)]
    group = AnswerGroup(
        route="predict", contract=project.applied().hash, package=package or digest(project), variant="fp32/1",
        answers=records.tobytes(), requests=b"".join(bodies), templates=((b"", b""),),
        views=tuple(_stored(project, rows, np.asarray(at, np.int64))) if "store" in columns else (),
        outputs=np.asarray(scores, "<f4").tobytes(), width=1, digest=b"",
        hashed=hashed,
    )  # fmt: skip
    batch = AnswerBatch(
        run=run, number=number, written=clock.now(), dropped=0, runtime="a test", callers=(caller,), groups=(group,)
    )
    RecordedAnswers(project.offline).append([batch])
