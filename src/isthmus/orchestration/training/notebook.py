"""The function that data scientists call. Importing this loads no third-party library."""

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
    """Join features to the rows of a spine, each as of the row's own time; one output row per spine row, in order.

    Uses the current tables. Rows are joined when they are read, and again on each read. `.table()` and `.reader()`
    return Arrow, `.torch()` returns tensors, and `.pandas()` a DataFrame that keeps integers beside nulls.
    `.write(folder)` writes Parquet and a record, from which `isthmus features training-set --like` makes the same set.

    Args:
        project: the project, or its folder.
        features: name of a service, or features as `view:feature`; the name of a view selects all its features.
        spine: rows with `event_timestamp` in a time zone, the join keys, and any columns to keep: an Arrow table,
            reader or dataset, a pandas or Polars frame, a path to Parquet or CSV, or a SELECT over the views and the
            Parquet sources. The rows of a SELECT or an Arrow reader can be read only once.
        status: whether to add a status column per view: present, null, expired or not_found.
        as_served: whether to join values as they were readable online at each time. Cannot be used with join="engine".
        join: "embedded" to join in this process, "engine" to join in the project's engine. The rows are the same.
            Request transforms always run in the engine.

    Raises:
        ContractMismatch: the definitions have not been applied, or a table was built under another contract.
        RequestError: a feature is not in the contract, options cannot be combined, or SQL is not a single SELECT.
        DataError: a table is missing, or the spine cannot be read, lacks a column or has a column of the wrong type.
    """
    from isthmus.orchestration.project import Project
    from isthmus.orchestration.training import data

    opened = project if isinstance(project, Project) else Project(Path(project))
    return data.training_data(opened, features, spine, status=status, as_served=as_served, join=join)
