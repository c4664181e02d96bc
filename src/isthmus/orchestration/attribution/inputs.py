"""The features of each row as they could be known, as they were served, and as the model was fed them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from isthmus.distill.declaration import Distillation
from isthmus.features import clock
from isthmus.features.contract.schema import SEPARATOR
from isthmus.features.days import DAY, Days
from isthmus.features.errors import DataError, RequestError
from isthmus.features.offline.latest import matches
from isthmus.features.offline.log import MaterializationLog
from isthmus.features.pointintime.served import ServedJoin
from isthmus.features.pointintime.staleness import fixed
from isthmus.features.values.arrow import micros
from isthmus.orchestration.artifacts import TrainingSet
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.record import history_of
from isthmus.orchestration.training.staleness import aged

TIME = "event_timestamp"

Index = np.ndarray[Any, np.dtype[np.int64]]


class Rows(NamedTuple):
    """Rows of a training set: a table with the ideal features, and their places in the training set."""

    examples: TrainingSet
    table: pa.Table
    places: Index

    def take(self, rows: Index) -> "Rows":
        """Some of them, by their places among these."""
        return self._replace(table=self.table.take(pa.array(rows)), places=self.places[rows])


def within(examples: TrainingSet, days: Days) -> Rows:
    """The rows of a training set whose event times are in a range of days.

    Raises:
        RequestError: there are none.
    """
    table = examples.table()
    times = micros(table[TIME])
    places = np.flatnonzero((times >= days.first * DAY) & (times < days.end * DAY))
    if not len(places):
        first, last = (clock.moment(int(at)).date() for at in (times.min(), times.max()))
        raise RequestError(
            f"training set {examples.id}", f"no row from {days}", expected=f"days from {first} to {last}",
            remedy="run `isthmus training-set` for newer rows",
        )  # fmt: skip
    return Rows(examples, table.take(pa.array(places)), places)


def served_since(project: Project, declared: Distillation) -> tuple[int | None, str]:
    """The moment from which all views of a student were served, and the view that came last; None if it never did.

    Raises:
        DataError: the log is damaged.
    """
    contract, log = project.applied(), MaterializationLog(project.offline, project.storage_options)
    began = [(-(1 << 63), "")]
    for name in dict.fromkeys(view for view, _ in contract.read(declared.student.name)):
        entries = log.of(contract.views[name])
        if not entries:
            return None, name
        began.append((entries[0].readable, name))
    return max(began)


def served(project: Project, declared: Distillation, rows: Rows) -> pa.Table:
    """The rows with the student's stored features as they were served, in the names of the training set.

    A student of a device gets them from the oldest snapshot that it may use.

    Raises:
        DataError: a table is not any more what was served, or what the training set was joined from.
    """
    contract, service = project.applied(), declared.student.name
    offline = project.offline_store()
    if declared.student.device is not None:
        age = declared.student.device.age // clock.MICROSECOND
        return aged(project, declared, rows.examples, rows.table, fixed(np.full(len(rows.places), age)), computed=False)
    features: dict[str, list[str]] = {}
    for view, feature in contract.read(service):
        features.setdefault(view, []).append(feature)
    made = tuple(f"{name}{SEPARATOR}" for name in (*rows.examples.features, *rows.examples.computed))
    spine = rows.table.select([name for name in rows.table.column_names if not name.startswith(made)])
    join = ServedJoin(
        spine.schema, offline, [history_of(offline, rows.examples, view) for view in features], features=features,
        status=False, threads=project.settings.profiles.training.threads,
    )  # fmt: skip
    return pa.Table.from_batches(join.batches(spine.to_batches()), join.schema)


class Fed(NamedTuple):
    """What the model was fed: the rows that are known, by their places, and their columns."""

    rows: Index
    table: pa.Table


def fed(file: Path, rows: pa.Table, keys: Sequence[str], inputs: Sequence[str]) -> Fed:
    """The inputs in a file of Parquet or Arrow, found by join keys and event time.

    The file may have some of the inputs and some of the rows. Rows of the same keys and time are not used.

    Raises:
        DataError: it cannot be read, lacks a key or all inputs, has a column that is no input, or no row of these.
    """
    table, where, named = _read(file), f"inputs {file}", [*keys, TIME]
    allowed = dict.fromkeys([*named, *inputs])
    problems = [f"no column {name}" for name in named if name not in table.column_names]
    problems += [f"{name}, which is no input" for name in table.column_names if name not in allowed]
    if not problems and not set(table.column_names) - set(named):
        problems = ["no input"]
    if len(table.column_names) != len(set(table.column_names)):
        problems.append("a column twice")
    if problems:
        expected = f"{', '.join(named)}, and any of {', '.join(name for name in inputs if name not in named)}"
        raise DataError(where, "; ".join(problems), expected=expected)
    try:
        names = table.select(named).cast(pa.schema([rows.schema.field(name) for name in named]))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        types = {name: str(rows.schema.field(name).type) for name in named}
        raise DataError(where, f"its keys have other types ({error})", expected=str(types)) from error
    once = _unique(names)
    places = matches(names.take(pa.array(once)), rows.select(named))
    known = np.flatnonzero(places >= 0)
    if not len(known):
        found = f"none of its {len(table):,} rows is one of the {len(rows):,} rows"
        expected, remedy = f"the same {', '.join(named)}", "name their range with --from and --to"
        raise DataError(where, found, expected=expected, remedy=remedy)
    columns = [name for name in table.column_names if name in inputs and name not in named]
    return Fed(known, table.select(columns).take(pa.array(once[places[known]])))


def _unique(names: pa.Table) -> Index:
    """The rows whose keys no other row has: of several, none says which input is whose."""
    distinct = names.group_by(names.column_names).aggregate([])
    groups = matches(distinct, names)
    counts = np.bincount(groups[groups >= 0], minlength=len(distinct))
    return np.flatnonzero((groups >= 0) & (counts[groups] == 1))


def _read(file: Path) -> pa.Table:
    try:
        if file.suffix in (".arrow", ".feather", ".ipc"):
            with pa.OSFile(str(file)) as source:
                return pa.ipc.open_file(source).read_all()
        return pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"inputs {file}", f"cannot be read ({error})", expected="a file of Parquet, or Arrow's .arrow",
                        remedy="name a file that is there") from error  # fmt: skip


def labels(table: pa.Table, label: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The labels of rows, NaN where none is known yet."""
    values: np.ndarray[Any, np.dtype[np.float64]] = pc.cast(table[label], pa.float64(), safe=False).to_numpy(
        zero_copy_only=False
    )
    return values
