"""Statistics stored with a training set: of its rows, and of the tables it was joined from."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.errors import DataError
from isthmus.features.files import read_pointer, write_atomically
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.quality.statistics import (
    FORMAT,
    FeatureStatistics,
    ViewStatistics,
    latest_event,
    measure,
    read,
    view_statistics,
)
from isthmus.features.quality.validation import ReferenceStatistics
from isthmus.orchestration.artifacts import STATISTICS, TrainingSet
from isthmus.orchestration.project import Project


class TrainingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a training set's inputs by full name, and of the tables that it was joined from, by view.

    `last` is the set's latest event time in microseconds since 1970 UTC. `views` covers the rows up to that time.
    """

    training_set: str
    contract: str
    rows: int
    last: int
    features: dict[str, FeatureStatistics]
    # Drift compares new rows with these: a training set repeats rows as its spine asks for them.
    views: dict[str, ViewStatistics]
    format: int = FORMAT


def write_statistics(
    training_set: TrainingSet, columns: Sequence[Column], histories: Sequence[ViewHistory], offline: OfflineStore
) -> None:
    """Measure the rows of a training set and of the tables that it was joined from, and save the statistics with it.

    The statistics go to the training set's folder. Later drift checks compare new rows with them. `columns` are the
    model inputs to measure. `histories` are the offline tables of the views, of which only rows up to the last event
    time of the training set are measured.
    """
    examples = training_set.dataset()
    last = latest_event(examples)
    rows, features = measure(columns, read(examples, [column.name for column in columns]))
    views = {}
    for history in histories:
        view = history.view
        with offline.reading(view.table):
            fingerprint = training_set.tables_sha256[view.name]
            views[view.name] = view_statistics(view, history.data, history.version, fingerprint, until=last)
    save_statistics(training_set, rows, last, features, views)


def save_statistics(
    training_set: TrainingSet, rows: int, last: int, features: dict[str, FeatureStatistics],
    views: dict[str, ViewStatistics],
) -> None:  # fmt: skip
    """Save the statistics of a training set's rows with it, and of the tables that they were joined from."""
    measured = TrainingStatistics(
        training_set=training_set.id, contract=training_set.contract, rows=rows, last=last, features=features,
        views=views,
    )  # fmt: skip
    write_atomically(
        training_set.path / STATISTICS, msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n"
    )


def has_statistics(training_set: TrainingSet) -> bool:
    try:
        _read(training_set.path)
    except (OSError, ValueError, msgspec.MsgspecError):
        return False
    return True


def _read(folder: Path) -> TrainingStatistics:
    return msgspec.json.decode((folder / STATISTICS).read_bytes(), type=TrainingStatistics)


def references(project: Project, view: ViewContract) -> list[ReferenceStatistics]:
    """Return the statistics of a view's table as of the latest training set of each distillation.

    Drift checks compare new rows with them. Skips distillations without statistics, and training sets that did not join
    this version of the view. Raises DataError if saved statistics are damaged.
    """
    references = []
    for name in project.definitions.distillations:
        try:
            measured = _read(read_pointer(project.state / "training" / name / "latest"))
        except FileNotFoundError:
            continue
        except (ValueError, msgspec.MsgspecError) as error:
            raise DataError(f"training set of {name}", f"its statistics cannot be read ({error})",
                            remedy="run `isthmus features training-set`") from error  # fmt: skip
        rows = measured.views.get(view.name)
        if rows is not None and rows.contract == view.hash:
            references.append(
                ReferenceStatistics(
                    name=name, training_set=measured.training_set, last=measured.last, features=rows.features
                )
            )
    return references
