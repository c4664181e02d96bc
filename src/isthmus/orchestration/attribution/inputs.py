"""Features of each row in three forms: as they could be known, as served, and as fed to the model."""

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
from isthmus.features.offline.history import index_of_keys
from isthmus.features.offline.log import MaterializationLog
from isthmus.features.pointintime.served import ServedJoin
from isthmus.features.pointintime.staleness import fixed_ages
from isthmus.features.values.arrow import micros
from isthmus.orchestration.artifacts import TrainingSet
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.record import history_of
from isthmus.orchestration.training.staleness import with_stale_inputs

TIME = "event_timestamp"

Index = np.ndarray[Any, np.dtype[np.int64]]


class TrainingRows(NamedTuple):
    """Rows of a training set: a table with the features known at each row's time, and its index in the set, (n,)."""

    examples: TrainingSet
    table: pa.Table
    places: Index

    def take(self, rows: Index) -> "TrainingRows":
        return self._replace(table=self.table.take(pa.array(rows)), places=self.places[rows])


def rows_in(examples: TrainingSet, days: Days) -> TrainingRows:
    table = examples.table()
    times = micros(table[TIME])
    places = np.flatnonzero((times >= days.first * DAY) & (times < days.end * DAY))
    if not len(places):
        first, last = (clock.moment(int(at)).date() for at in (times.min(), times.max()))
        raise RequestError(
            f"training set {examples.id}", f"no row from {days}", expected=f"days from {first} to {last}",
            remedy="run `isthmus features training-set` for newer rows",
        )  # fmt: skip
    return TrainingRows(examples, table.take(pa.array(places)), places)


def served_since(project: Project, declared: Distillation) -> tuple[int | None, str]:
    """Return the time since which servers have had all feature views of a student, to skip earlier rows.

    Also return the name of the view that was served last. The time is in microseconds since 1970 UTC. If a view was
    never materialized under the applied contract, the time is None and the name is that view's. If the student reads no
    view, the time is the smallest int64 and the name is empty.
    """
    contract, log = project.applied(), MaterializationLog(project.offline, project.storage_options)
    began = [(-(1 << 63), "")]
    for name in dict.fromkeys(view for view, _ in contract.stored_features(declared.student.name)):
        entries = log.runs(contract.views[name])
        if not entries:
            return None, name
        began.append((entries[0].readable, name))
    return max(began)


def served_features(project: Project, declared: Distillation, rows: TrainingRows) -> pa.Table:
    """Replace the student's stored features in training rows by those that servers returned then, to measure staleness.

    The result has the columns of the spine and these features, without computed ones. For a student on a device,
    features come from the oldest snapshot that the device may use. Raise DataError if a table has lost the rows that
    were served or that the training set was joined from.
    """
    contract, service = project.applied(), declared.student.name
    offline = project.offline_store()
    if declared.student.device is not None:
        age = declared.student.device.age // clock.MICROSECOND
        return with_stale_inputs(
            project, declared, rows.examples, rows.table, fixed_ages(np.full(len(rows.places), age)), computed=False
        )
    features: dict[str, list[str]] = {}
    for view, feature in contract.stored_features(service):
        features.setdefault(view, []).append(feature)
    feature_prefixes = tuple(f"{name}{SEPARATOR}" for name in (*rows.examples.features, *rows.examples.computed))
    spine = rows.table.select([name for name in rows.table.column_names if not name.startswith(feature_prefixes)])
    join = ServedJoin(
        spine.schema, offline, [history_of(offline, rows.examples, view) for view in features], features=features,
        status=False, threads=project.settings.profiles.training.threads,
    )  # fmt: skip
    return pa.Table.from_batches(join.batches(spine.to_batches()), join.schema)


def read_model_inputs(file: Path, rows: pa.Table, keys: Sequence[str], inputs: Sequence[str]) -> tuple[Index, pa.Table]:
    """Read the inputs that a model was fed from a Parquet or Arrow file, and match them with `rows` to measure skew.

    Rows match if their join keys (the columns `keys`) and event times are equal. `inputs` names the inputs of the
    model. Return the indices of the matched rows in `rows`, and a table of their inputs. The file need not have all
    inputs or all rows. If several rows of the file have the same keys and time, all of them are ignored. Raise
    DataError if the file cannot be read, lacks a key column, has none of the inputs, has unknown columns, or matches no
    row.
    """
    table, source, key_columns = _read(file), f"inputs {file}", [*keys, TIME]
    allowed = dict.fromkeys([*key_columns, *inputs])
    problems = [f"no column {name}" for name in key_columns if name not in table.column_names]
    problems += [f"column {name}, which is not an input" for name in table.column_names if name not in allowed]
    if not problems and not set(table.column_names) - set(key_columns):
        problems = ["no input"]
    if len(table.column_names) != len(set(table.column_names)):
        problems.append("a duplicate column")
    if problems:
        expected = (
            f"{', '.join(key_columns)}, and any of {', '.join(name for name in inputs if name not in key_columns)}"
        )
        raise DataError(source, "; ".join(problems), expected=expected)
    try:
        names = table.select(key_columns).cast(pa.schema([rows.schema.field(name) for name in key_columns]))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        types = {name: str(rows.schema.field(name).type) for name in key_columns}
        raise DataError(source, f"its keys have the wrong types ({error})", expected=str(types)) from error
    unique = _unique(names)
    places = index_of_keys(names.take(pa.array(unique)), rows.select(key_columns))
    matched = np.flatnonzero(places >= 0)
    if not len(matched):
        problem = f"none of its {len(table):,} rows is one of the {len(rows):,} rows"
        expected, remedy = f"the same {', '.join(key_columns)}", "select their range with --from and --to"
        raise DataError(source, problem, expected=expected, remedy=remedy)
    columns = [name for name in table.column_names if name in inputs and name not in key_columns]
    return matched, table.select(columns).take(pa.array(unique[places[matched]]))


def _unique(names: pa.Table) -> Index:
    distinct = names.group_by(names.column_names).aggregate([])
    groups = index_of_keys(distinct, names)
    counts = np.bincount(groups[groups >= 0], minlength=len(distinct))
    return np.flatnonzero((groups >= 0) & (counts[groups] == 1))


def _read(file: Path) -> pa.Table:
    try:
        if file.suffix in (".arrow", ".feather", ".ipc"):
            with pa.OSFile(str(file)) as source:
                return pa.ipc.open_file(source).read_all()
        return pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"inputs {file}", f"cannot be read ({error})", expected="a Parquet or .arrow file",
                        remedy="check the path") from error  # fmt: skip


def labels(table: pa.Table, label: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    values: np.ndarray[Any, np.dtype[np.float64]] = pc.cast(table[label], pa.float64(), safe=False).to_numpy(
        zero_copy_only=False
    )
    return values
