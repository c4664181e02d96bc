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
    """Join features to the rows of a spine, each as of the row's own moment; one output row per spine row, in order.

    Reads the current tables. Rows are computed when they are read: `.table()` and `.reader()` return Arrow, `.pandas()`
    a DataFrame whose integers stay integers beside nulls, `.torch()` tensors. `.write(folder)` writes Parquet and a
    record that `isthmus features training-set --like` reproduces.

    Args:
        project: the project, or its folder.
        features: name of a service, or features as `view:feature`; the name of a view selects all its features.
        spine: rows with `event_timestamp` in a time zone, the join keys, and any columns to keep: an Arrow table,
            reader or dataset, a pandas or Polars frame, a path to Parquet or CSV, or a SELECT over the views.
        status: whether to add a status column per view: present, null, expired or not_found.
        as_served: whether to return what was readable online at each moment, by the log of materializations, instead of
            what could have been known.
        join: "embedded" to join in this process, "engine" to join in the project's engine. The rows are the same.

    Raises:
        ContractMismatch: the definitions have not been applied, or a table was built under another contract.
        RequestError: a feature is not in the contract, or options cannot be combined.
        DataError: a table is missing, or the spine cannot be read, lacks a column or has a column of the wrong type.
    """
    from isthmus.orchestration.project import Project
    from isthmus.orchestration.training import data

    opened = project if isinstance(project, Project) else Project(Path(project))
    return data.training_data(opened, features, spine, status=status, as_served=as_served, join=join)
