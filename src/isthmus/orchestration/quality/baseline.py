"""Statistics beside a training set: of what it holds, and of the tables it was joined from.

New rows of a table are compared with its own rows of that time, never with the training set: in that one a row stands
as often as it was asked for, and both would differ without anything having moved.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features.contract.contract import Column, ViewContract
from isthmus.features.errors import DataError
from isthmus.features.files import read_pointer, write_atomically
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.quality.statistics import (
    FORMAT,
    FeatureStatistics,
    ViewStatistics,
    measure,
    read,
    view_statistics,
)
from isthmus.features.quality.validation import Reference
from isthmus.orchestration.artifacts import STATISTICS
from isthmus.orchestration.project import Project

FILE = STATISTICS


class Made(Protocol):
    """What is recorded of a training set."""

    @property
    def id(self) -> str:
        """Its identity."""

    @property
    def contract(self) -> str:
        """Hash of the contract."""

    @property
    def tables_sha256(self) -> dict[str, str]:
        """View to the fingerprint of the rows it was joined from."""


class TrainingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a training set and its tables looked like.

    Attributes:
        training_set: its identity.
        contract: hash of the contract.
        rows: rows of the training set.
        last: its latest moment, in microseconds.
        features: the inputs of teacher and student by full name, as the training set holds them.
        views: the rows of each table with event times up to `last`.
        format: of this record.
    """

    training_set: str
    contract: str
    rows: int
    last: int
    features: dict[str, FeatureStatistics]
    views: dict[str, ViewStatistics]
    format: int = FORMAT


def write(
    folder: Path,
    data: Path,
    made: Made,
    columns: Sequence[Column],
    histories: Sequence[ViewHistory],
    offline: OfflineStore,
) -> None:
    """Measures a training set that has been written, and the tables it was joined from.

    Args:
        folder: where the statistics go.
        data: Parquet file or folder with its rows.
        made: its record.
        columns: what to measure of it.
        histories: the tables, at the versions that were joined.
        offline: the store they are in.
    """
    examples = ds.dataset(data)
    times = (
        pc.max(pc.cast(batch["event_timestamp"], "int64")).as_py() for batch in read(examples, ["event_timestamp"])
    )
    last = max((time for time in times if time is not None), default=0)
    rows, features = measure(columns, read(examples, [column.name for column in columns]))
    views = {}
    for history in histories:
        view = history.view
        with offline.reading(view.table):
            views[view.name] = view_statistics(
                view, history.data, history.version, made.tables_sha256[view.name], until=last
            )
    measured = TrainingStatistics(
        training_set=made.id, contract=made.contract, rows=rows, last=last, features=features, views=views
    )
    write_atomically(folder / FILE, msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


def references(project: Project, view: ViewContract) -> list[Reference]:
    """What the rows of a view looked like in every training set in use that was joined from it under this contract.

    Raises:
        DataError: statistics are damaged.
    """
    found = []
    for measured, name in _in_use(project):
        then = measured.views.get(view.name)
        if then is not None and then.contract == view.hash:
            found.append(
                Reference(name=name, training_set=measured.training_set, last=measured.last, features=then.features)
            )
    return found


def _in_use(project: Project) -> list[tuple[TrainingStatistics, str]]:
    """The statistics of the last training set of each distillation that has one."""
    found: list[tuple[TrainingStatistics, str]] = []
    for name in project.definitions.distillations:
        file: Any = project.state / "training" / name
        try:
            file = read_pointer(file / "latest") / FILE
            found.append((msgspec.json.decode(file.read_bytes(), type=TrainingStatistics), name))
        except FileNotFoundError:
            continue
        except (ValueError, msgspec.MsgspecError) as error:
            raise DataError(f"training set of {name}", f"its statistics cannot be read ({error})",
                            remedy="run `isthmus training-set`") from error  # fmt: skip
    return found
