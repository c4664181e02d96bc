"""A training set as a device sees it: the student's inputs come from a snapshot that is some time old."""

from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.distill.declaration import Distillation
from isthmus.features.contract.schema import SEPARATOR, sha256
from isthmus.features.definition.spec import Snapshot
from isthmus.features.files import publish
from isthmus.features.pointintime.staleness import AgedJoin, Ages, random_ages
from isthmus.orchestration.artifacts import TrainingSet
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.record import history_of
from isthmus.orchestration.training.requestcolumns import request_columns
from isthmus.package.snapshot.selection import rows_in_snapshot

_FOLDER, _FILE = "device", "rows.parquet"


def device_rows_file(project: Project, declared: Distillation, examples: TrainingSet) -> str:
    """Return the path of a Parquet file with the rows of a training set as devices would see them. Write it if missing.

    Used to train students that run on devices. In each row, the student's inputs come from a snapshot of random age, up
    to the limit that the student's `device` declares. The student must have a `device`. Inputs are null for keys that
    devices do not keep. The ages are the same in each call. Leaves out inputs that only the teacher reads. Raises
    DataError if a table version is gone.
    """
    device, service = _device(declared), project.applied().service(declared.student.name)

    def rows() -> pa.Table:
        return with_stale_inputs(project, declared, examples, examples.table(), random_ages(device))

    return rows_file(examples, device, rows, service=service.hash)


def rows_file(examples: TrainingSet, device: Snapshot, rows: Callable[[], pa.Table], **identity: str) -> str:
    """Return the path of a Parquet file in the folder of a training set. Write it if it is missing.

    The file gets the result of `rows`, which is called only then. The path depends only on `device` and `identity`, so
    they must include everything that determines the rows.
    """
    folder = examples.path / f"{_FOLDER}-{sha256({_FOLDER: device.identity(), **identity})[:12]}"
    if not (folder / _FILE).exists():
        publish(folder, lambda fresh: pq.write_table(rows(), fresh / _FILE))
    return str(folder / _FILE)


def with_stale_inputs(
    project: Project,
    declared: Distillation,
    examples: TrainingSet,
    rows: pa.Table,
    ages: Ages,
    *,
    computed: bool = True,
) -> pa.Table:
    """Replace the student's inputs in `rows` of the training set `examples` by values from older snapshots.

    The result shows the inputs that a device would have. The student must have a `device`, and inputs are null for keys
    that the device does not keep. `ages` takes the times of consecutive rows and the index of the first row, and
    returns the age of the snapshot for each row. Times and ages are in microseconds. Leaves out inputs that only the
    teacher reads. With `computed`, the project's engine adds the inputs from request transforms, which takes seconds
    even for a few rows. Raises DataError if a table version is gone.
    """
    contract, service, offline = (
        project.applied(),
        declared.student.name,
        project.offline_store(),
    )
    features: dict[str, list[str]] = {}
    for view, feature in contract.stored_features(service):
        features.setdefault(view, []).append(feature)
    fields: dict[str, list[str]] = {}
    for transform, field in contract.service(service).computed:
        fields.setdefault(transform, []).append(field)
    transformed = request_columns(project, contract, fields) if computed else None
    feature_prefixes = tuple(f"{name}{SEPARATOR}" for name in (*examples.features, *examples.computed))
    spine = rows.select([name for name in rows.column_names if not name.startswith(feature_prefixes)])
    keeps = partial(rows_in_snapshot, device=_device(declared))
    join = AgedJoin(
        spine.schema, [history_of(offline, examples, view) for view in features], ages=ages, keeps=keeps,
        features=features, status=False, threads=project.settings.profiles.training.threads, reading=offline.reading,
    )  # fmt: skip
    joined = join.batches(spine.to_batches())
    schema = transformed.schema(join.schema) if transformed else join.schema
    return pa.Table.from_batches(transformed.batches(joined) if transformed else joined, schema)


def _device(declared: Distillation) -> Snapshot:
    assert declared.student.device is not None  # noqa: S101 - callers check it
    return declared.student.device
