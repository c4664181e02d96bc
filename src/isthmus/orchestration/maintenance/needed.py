"""Find the older versions of tables that a project still needs, for training sets and replays of served values."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.features import clock
from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import DAY
from isthmus.features.errors import DataError
from isthmus.features.offline.log import Materialization, MaterializationLog
from isthmus.features.offline.pushes import FOLDER, PushLog
from isthmus.orchestration.artifacts import DATA, RECORD, TrainingSet, records_folder
from isthmus.orchestration.project import Project

Versions = dict[str, set[int]]
"""Version numbers by the folder of the table in the offline store."""


def needed_versions(project: Project) -> Versions:
    """Return the versions that must stay even if they are older than `keep_days`.

    These are the versions in each training set's record, and the versions that a replay of values served in the last
    `keep_days` reads. A view with pushed or streamed rows needs each version that was written to Redis: a pushed row
    may have been served since any of them. Raise DataError if a record or the log of materializations cannot be read,
    because the versions that it needs are then unknown.
    """
    log, needed = MaterializationLog(project.offline, project.storage_options), defaultdict[str, set[int]](set)
    since = project.now() - int(project.settings.stores.keep_days * DAY)
    for view in project.generations().views().values():
        needed[view.table] |= _served(project, view, log.runs(view), since)
    for record in _training_sets(project):
        for name, version in record.tables.items():
            view = ViewContract.from_dict(name, record.views[name])
            needed[view.table].add(version)
            if record.served is not None:
                runs = [run for run in log.runs(view) if run.readable <= record.served[name]]
                needed[view.table] |= _served(project, view, runs, _first_time(record))
                if (pushed := record.served.get(f"{name}|pushed")) is not None:
                    needed[f"{FOLDER}/{view.table}"].add(pushed)
    return needed


def _served(project: Project, view: ViewContract, runs: Sequence[Materialization], since: int) -> set[int]:
    """Return the versions of the runs whose rows were served at `since` or later, in microseconds since 1970 UTC."""
    pushed = PushLog(project.offline, view.table, project.storage_options).version() is not None
    # A run's rows are served until the next one.
    ends = [*(run.readable for run in runs[1:]), since + 1]
    return {run.version for run, end in zip(runs, ends, strict=False) if pushed or end > since}


def _training_sets(project: Project) -> Iterator[TrainingSet]:
    folders = {file.parent for file in (project.state / "training").glob(f"*/*/{RECORD}")}
    for folder in sorted(folders | {Path(pointer.read_text()) for pointer in records_folder(project).glob("*")}):
        try:
            yield TrainingSet.read(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue  # the user has removed the training set
        except (OSError, ValueError, TypeError, KeyError) as error:
            found = f"its record cannot be read ({error}), so the versions that it needs are unknown, and all stay"
            remedy = "restore the record, or remove the folder"
            raise DataError(f"training set {folder}", found, remedy=remedy) from error


def _first_time(record: TrainingSet) -> int:
    """Return the earliest time in a training set, from its file's statistics; 0 if it is unknown."""
    try:
        file = pq.ParquetFile(record.path / DATA).metadata
    except (OSError, pa.ArrowException):
        return 0
    column = file.schema.names.index("event_timestamp")
    parts = [file.row_group(n).column(column).statistics for n in range(file.num_row_groups)]
    return min((clock.micros(part.min) if part and part.has_min_max else 0 for part in parts), default=0)
