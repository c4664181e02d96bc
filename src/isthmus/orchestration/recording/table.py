"""The Delta table of recorded answers, next to the offline tables, partitioned by the day a batch was written."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable, Transaction

from isthmus.features.days import DAY
from isthmus.features.offline.delta import StoredTable, TableErrors, files_of
from isthmus.features.values.arrow import ARROW
from isthmus.features.values.columns import Ints
from isthmus.orchestration.project import Project
from isthmus.serving.recorder.batch import ANSWER, AnswerBatch, AnswerGroup

# No view has this name: declared names begin with a letter.
FOLDER = "_recorded"
# Files per day before they are compacted.
FILES = 64
# Hours for which deleted files stay, for readers that still use them.
HOURS = 24

_TIME = ARROW["UnixTimestamp"]
_APPLICATION = "isthmus.recorded."

# One row per answer. `content`, `event`, `known` and `status` have the rows of the first view, then the next view's.
SCHEMA = pa.schema(
    [
        pa.field("day", pa.date32(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("run", pa.string(), nullable=False),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("written", _TIME, nullable=False),
        pa.field("at", _TIME, nullable=False),
        pa.field("route", pa.string(), nullable=False),
        pa.field("caller", pa.string(), nullable=False),
        pa.field("seconds", pa.float32(), nullable=False),
        pa.field("contract", pa.string(), nullable=False),
        pa.field("package", pa.string(), nullable=False),
        pa.field("variant", pa.string(), nullable=False),
        pa.field("runtime", pa.string(), nullable=False),
        pa.field("dropped", pa.int64(), nullable=False),
        pa.field("rows", pa.int32(), nullable=False),
        pa.field("request", pa.string(), nullable=False),
        pa.field("hashed", pa.list_(pa.string())),
        pa.field("views", pa.list_(pa.string())),
        pa.field("hashes", pa.list_(pa.string())),
        pa.field("content", pa.list_(pa.int64())),
        pa.field("event", pa.list_(pa.int64())),
        pa.field("known", pa.list_(pa.int64())),
        pa.field("status", pa.list_(pa.int8())),
        pa.field("outputs", pa.list_(pa.float32())),
        pa.field("digest", pa.list_(pa.int64())),
    ]
)

_ERRORS = TableErrors(
    "recorded answers",
    damaged="the table is damaged: restore that folder, or remove it and lose the recorded answers",
    conflict=(
        "another process wrote to them at the same time",
        "nothing is lost: run `isthmus answers collect` again",
    ),
    unwritten="nothing is lost: fix the cause, then run `isthmus answers collect` again",
)


class RecordedAnswers:
    """Delta table of recorded answers. A run is one server process; its batches are numbered from 1."""

    def __init__(self, root: str, storage_options: Mapping[str, str] | None = None) -> None:
        # Requests and answers are private to the server's owner, as in the spool.
        self._stored = StoredTable(root, FOLDER, storage_options, _ERRORS, private=True)
        self.path = self._stored.path

    @classmethod
    def of(cls, project: Project) -> "RecordedAnswers":
        return cls(project.offline, project.storage_options)

    def last_batches(self, runs: Sequence[str]) -> dict[str, int]:
        with self._stored.reading():
            table = self._stored.open(check=False)
            found = {run: None if table is None else table.transaction_version(_APPLICATION + run) for run in runs}
        return {run: version or 0 for run, version in found.items()}

    def batches(self, run: str) -> set[int]:
        return set(self.read(ds.field("run") == run, ["run", "sequence", "batch"])["batch"].to_pylist())

    def append(
        self,
        batches: Sequence[AnswerBatch],
        parts: Sequence[pa.Table] | None = None,
        known: Mapping[str, int] = MappingProxyType({}),
    ) -> int:
        """Append the answers of batches to the table in one commit, and return the number of answers.

        The commit also saves the number of the last batch of each run (server process), so that the collector can skip
        batches that are in the table. `append` itself does not skip them. `known` has the last batch numbers that are
        in the table now; they are never lowered. Pass as `parts` the results of `answers_of` for the batches if they
        are already computed. Raises DataError if writing fails, or if another process wrote to the table at the same
        time.
        """
        rows = pa.concat_tables([SCHEMA.empty_table(), *(map(answers_of, batches) if parts is None else parts)])
        last = {batch.run: known.get(batch.run, 0) for batch in batches}
        for batch in batches:
            last[batch.run] = max(last[batch.run], batch.number)
        noted = [Transaction(_APPLICATION + run, number) for run, number in last.items()]
        self._stored.append(rows, transactions=noted, retries=0, partition_by=["day"])
        return len(rows)

    def delete_older(self, days: float, now: int) -> None:
        with self._stored.writing():
            table = self._stored.open(check=False)
            if table is None:
                return
            # Clipped to 1970: `days` may reach back further than a date can express.
            first = pa.scalar(int(max(now // DAY - days, 0)), pa.date32()).as_py()
            files = _days(table)
            if any(day < first for day in files):
                table.delete(f"day < '{first}'")
            for day in (day for day, count in files.items() if count > FILES and day >= first):
                table.optimize.compact(partition_filters=[("day", "=", str(day))])
            # Also if nothing was deleted now: files of earlier deletions may be due.
            table.vacuum(retention_hours=HOURS, enforce_retention_duration=False, dry_run=False)

    def read(self, condition: ds.Expression, columns: Sequence[str] | None = None) -> pa.Table:
        with self._stored.reading():
            table = self._stored.open(check=False)
            if table is None:
                return SCHEMA.empty_table()
            rows = table.to_pyarrow_dataset(filesystem=files_of(table, self.path)).to_table(
                filter=condition, columns=None if columns is None else [*columns]
            )
        return rows.sort_by([("run", "ascending"), ("sequence", "ascending")])

    def size(self) -> tuple[int, int]:
        with self._stored.reading():
            table = self._stored.open(check=False)
            if table is None:
                return 0, -1
            return sum(pa.table(table.get_add_actions(flatten=True))["num_records"].to_pylist()), table.version()

    def by_id(self, ids: pa.ChunkedArray) -> pa.Table:
        rows = self.read(ds.field("id").isin(ids))
        return rows.take(pc.index_in(ids, value_set=rows["id"]).drop_null())


def _days(table: DeltaTable) -> Counter[date]:
    return Counter(file["day"] for file in pa.table(table.get_add_actions())["partition"].to_pylist())


def answers_of(batch: AnswerBatch) -> pa.Table:
    return pa.concat_tables([SCHEMA.empty_table(), *(group_rows(batch, group) for group in batch.groups)])


def group_rows(batch: AnswerBatch, group: AnswerGroup) -> pa.Table:
    found = np.frombuffer(group.answers, ANSWER)
    count, rows, length = len(found), found["rows"].astype(np.int64), found["length"].astype(np.int64)
    if length.sum() != len(group.requests):
        raise ValueError(f"batch {batch.number} of {batch.run} has columns of different lengths")
    ends = np.cumsum(length).tolist()
    width = len(group.views)

    def same(value: Any) -> pa.Array:
        return pa.repeat(pa.scalar(value), count)

    def requests() -> Iterator[bytes]:
        for place, begin, end in zip(found["template"].tolist(), [0, *ends], ends, strict=False):
            head, tail = group.templates[place]
            yield head + group.requests[begin:end] + tail

    def listed(values: Sequence[str]) -> pa.Array:
        return pa.repeat(pa.scalar(list(values), pa.list_(pa.string())), count)

    def of_views(name: str, dtype: Any) -> pa.Array:
        columns = [np.frombuffer(getattr(view, name), dtype) for view in group.views]
        return _lists(_by_answer(columns, rows), rows * width)

    outputs, digest = np.frombuffer(group.outputs, "<f4"), np.frombuffer(group.digest, np.int64)
    columns = {
        "day": pa.repeat(pa.scalar(batch.written // DAY, pa.int32()).cast(pa.date32()), count),
        "id": pa.array([f"{batch.run}-{number:x}" for number in found["sequence"].tolist()]),
        "run": same(batch.run),
        "batch": same(batch.number),
        "sequence": pa.array(found["sequence"]),
        "written": same(batch.written).cast(_TIME),
        "at": pa.array(found["at"]).cast(_TIME),
        "route": same(group.route),
        "caller": pa.array([batch.callers[place] for place in found["caller"].tolist()], pa.string()),
        "seconds": pa.array(found["seconds"]),
        "contract": same(group.contract),
        "package": same(group.package),
        "variant": same(group.variant),
        "runtime": same(batch.runtime),
        "dropped": same(batch.dropped),
        "rows": pa.array(found["rows"]),
        "request": pa.array(requests(), pa.binary()),
        "hashed": listed(group.hashed),
        "views": listed([view.view for view in group.views]),
        "hashes": listed([view.hash for view in group.views]),
        "content": of_views("content", np.int64),
        "event": of_views("event", np.int64),
        "known": of_views("known", np.int64),
        "status": of_views("status", np.int8),
        "outputs": _lists(outputs, rows * group.width),
        "digest": _lists(digest, rows if len(digest) else rows * 0),
    }
    return pa.table([columns[field.name].cast(field.type) for field in SCHEMA], SCHEMA)


def _lists(values: Any, sizes: Ints) -> pa.ListArray:
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    if ends[-1] != len(values):
        raise ValueError(f"{len(values)} values for {ends[-1]} places")
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values))


def _by_answer(columns: Sequence[Any], rows: Ints) -> Any:
    if not columns:
        return np.empty(0, np.int64)
    joined = np.empty(len(columns) * int(rows.sum()), columns[0].dtype)
    for column, places in zip(columns, _places(rows, len(columns)), strict=True):
        joined[places] = column
    return joined


def by_view(joined: Any, rows: Ints, views: int) -> list[Any]:
    return [joined[places] for places in _places(rows, views)]


def _places(rows: Ints, views: int) -> Iterator[Ints]:
    starts = np.cumsum(rows) - rows
    offset = np.arange(rows.sum()) - np.repeat(starts, rows)
    for number in range(views):
        yield np.repeat(views * starts + number * rows, rows) + offset
