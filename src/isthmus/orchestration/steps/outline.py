"""Outline of a project as plain data, from which Dagster builds the graph without feast, pyspark and torch."""

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from isthmus.features.definition.spec import Source as DeclaredSource

FORMAT = 9


class CodeLocation(msgspec.Struct, frozen=True):
    file: str
    line: int


class SourceOutline(msgspec.Struct, frozen=True):
    """Name and declared location of a source of raw data, without secrets. Fields that do not apply are empty."""

    name: str
    path: str = ""
    delta: str = ""
    iceberg: str = ""
    sql: str = ""
    connection: str = ""
    version_sql: str = ""

    @property
    def declared(self) -> "DeclaredSource":
        from isthmus.features.definition.spec import Source as DeclaredSource

        return DeclaredSource(**msgspec.structs.asdict(self))


class ViewOutline(msgspec.Struct, frozen=True):
    """Name, columns and table of a feature view.

    `code` is the hash of its contract, and `columns` are (name, type, description). `table` is the folder or URL of the
    offline table. `ttl` is in seconds, None if values never expire. `place` is the location of its Python function,
    None without one.
    """

    name: str
    description: str
    owner: str
    code: str
    columns: tuple[tuple[str, str, str], ...]
    table: str
    sources: tuple[str, ...]
    ttl: float | None
    place: CodeLocation | None


class ModelOutline(msgspec.Struct, frozen=True):
    """A distillation, with the code versions of its assets.

    Attributes:
        views: views that the teacher or the student reads; the student reads only `served`.
        sources: sources that the spine (the table of training examples) reads.
        examples: code version of the training set.
        teaching: code version of the teacher; leaves out code that only evaluates a student.
        training: code version of the trained models and their evaluation.
        export: code version of the package and its deployment.
        bounded: bounds on attribution stages are declared, so the attribution check runs.
        monitored: servers record answers and the label can be monitored, so the monitoring checks run.
    """

    name: str
    description: str
    owner: str
    views: tuple[str, ...]
    sources: tuple[str, ...]
    served: tuple[str, ...]
    examples: str
    teaching: str
    training: str
    export: str
    bounded: bool
    monitored: bool


class SnapshotOutline(msgspec.Struct, frozen=True):
    name: str
    views: tuple[str, ...]
    cron: str | None
    code: str


class Outline(msgspec.Struct, frozen=True):
    """Everything about a project that Dagster's graph shows. `contract` is the hash of its current definitions.

    Attributes:
        automation: Dagster's sensors run by default.
        days: first day of the daily build partitions, and the day after the last (None unless the project's clock is
            fixed); None if builds have no partitions.
        retrain: cron schedule for training; None trains only after drift.
        made_of: digest of the files and variables from which the outline was compiled.
        records: servers record answers.
        streams: sources with a stream that a view reads.
        parallel: number of ops that train the students and controls of a distillation side by side.
    """

    project: str
    root: str
    contract: str
    sources: tuple[SourceOutline, ...]
    views: tuple[ViewOutline, ...]
    models: tuple[ModelOutline, ...]
    snapshots: tuple[SnapshotOutline, ...]
    days: tuple[str, str | None] | None
    automation: bool
    retrain: str | None
    made_of: str
    storage_options: dict[str, str] = {}
    records: bool = False
    streams: tuple[str, ...] = ()
    parallel: int = 1
    format: int = FORMAT
