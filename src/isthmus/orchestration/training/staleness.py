"""A training set as a device sees it: what the student reads comes from a snapshot that is some time old."""

from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.distill.declaration import Distillation
from isthmus.features.contract.schema import SEPARATOR, sha256
from isthmus.features.definition.spec import Snapshot
from isthmus.features.files import publish
from isthmus.features.pointintime.staleness import AgedJoin, Ages, drawn
from isthmus.orchestration.artifacts import TrainingSet
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.record import history_of
from isthmus.orchestration.training.requestcolumns import request_columns
from isthmus.package.snapshot.selection import of_kept_keys

_FOLDER, _FILE = "device", "rows.parquet"


def seen(project: Project, declared: Distillation, examples: TrainingSet) -> str:
    """The file with the rows of a training set as devices see them, at ages that are drawn; written when it is missing.

    Raises:
        DataError: a table is not any more what the training set was joined from.
    """
    device = _device(declared)
    return rows_file(examples, device, lambda: aged(project, declared, examples, examples.table(), drawn(device)))


def rows_file(examples: TrainingSet, device: Snapshot, rows: Callable[[], pa.Table], **identity: str) -> str:
    """The file beside a training set with such rows; written when it is missing."""
    folder = examples.path / f"{_FOLDER}-{sha256({_FOLDER: device.identity(), **identity})[:12]}"
    if not (folder / _FILE).exists():
        publish(folder, lambda fresh: pq.write_table(rows(), fresh / _FILE))
    return str(folder / _FILE)


def aged(
    project: Project,
    declared: Distillation,
    examples: TrainingSet,
    rows: pa.Table,
    ages: Ages,
    *,
    computed: bool = True,
) -> pa.Table:
    """Rows of a training set in which the student's inputs are those of snapshots of these ages.

    The inputs that only the teacher reads are left out, and without `computed` those of request transforms: the engine
    takes seconds for what their graphs compute of few rows at once.

    Raises:
        DataError: a table is not any more what the training set was joined from.
    """
    contract, service, offline = (
        project.applied(),
        declared.student.name,
        project.offline_store(),
    )
    features: dict[str, list[str]] = {}
    for view, feature in contract.read(service):
        features.setdefault(view, []).append(feature)
    fields: dict[str, list[str]] = {}
    for transform, field in contract.service(service).computed:
        fields.setdefault(transform, []).append(field)
    transformed = request_columns(project, contract, fields) if computed else None
    made = tuple(f"{name}{SEPARATOR}" for name in (*examples.features, *examples.computed))
    spine = rows.select([name for name in rows.column_names if not name.startswith(made)])
    keeps = partial(of_kept_keys, device=_device(declared))
    join = AgedJoin(
        spine.schema, [history_of(offline, examples, view) for view in features], ages=ages, keeps=keeps,
        features=features, status=False, threads=project.settings.profiles.training.threads, reading=offline.reading,
    )  # fmt: skip
    joined = join.batches(spine.to_batches())
    schema = transformed.schema(join.schema) if transformed else join.schema
    return pa.Table.from_batches(transformed.batches(joined) if transformed else joined, schema)


def _device(declared: Distillation) -> Snapshot:
    assert declared.student.device is not None  # noqa: S101 - of those who ask
    return declared.student.device
