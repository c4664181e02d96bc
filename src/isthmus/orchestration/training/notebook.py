"""What a data scientist calls. Importing this loads no third-party library."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.orchestration.project import Project
    from isthmus.orchestration.training.data import TrainingData


def training_data(
    project: "Project | str | PathLike[str]",
    features: str | Sequence[str],
    spine: object,
    *,
    status: bool = True,
    as_served: bool = False,
    join: str = "embedded",
) -> "TrainingData":
    """What the views of a project answered at each row's own moment: one row per row of the spine, in its order.

    The tables are those of now. Nothing is computed until it is read: `.table()` and `.reader()` give Arrow,
    `.pandas()` a DataFrame whose whole numbers stay whole beside nulls, `.torch()` tensors, `.write(folder)` Parquet
    with a record that `isthmus training-set --like` repeats.

    Args:
        project: the project, or its folder.
        features: the name of a service, or features as `view:feature`; a view's name alone stands for all of its own.
        spine: the rows: an Arrow table, reader or dataset, a pandas or Polars frame, a path to Parquet or CSV, or a
            SELECT over the views. They have `event_timestamp` in a time zone, the join keys, and any columns to carry.
        status: whether to add a column per view that says what it answered: present, null, expired or not_found.
        as_served: whether to answer with what was readable online at each moment, by the log of materializations,
            instead of what could have been known.
        join: where to join: "embedded" in this process, or "engine" by the project's engine. The rows are the same.

    Raises:
        RequestError: a feature is not in the contract, or options do not go together.
        DataError: a table is not there, or the spine cannot be read, lacks a column or has it in another type.
    """
    from isthmus.orchestration.project import Project
    from isthmus.orchestration.training import data

    opened = project if isinstance(project, Project) else Project(Path(project))
    return data.training_data(opened, features, spine, status=status, as_served=as_served, join=join)
