"""Where Feast's file sources are."""

import os
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    from feast.data_source import DataSource
    from feast.infra.offline_stores.file_source import FileSource

from isthmus.features.errors import ConfigurationError, Problem

Int64s = np.ndarray[Any, np.dtype[np.int64]]
KnownAt = Literal["created", "event"]

_NO_DATA = [".", "_SUCCESS", "_metadata", "_common_metadata", "_committed", "_started", "_temporary"]
"""Files beside the data. Feast's logs are in folders that are called `__log_date=…`, which Arrow would leave out."""


def file_source(source: DataSource | None, where: str) -> FileSource:
    """The source as the only kind of which rows can be read here.

    Raises:
        ConfigurationError: it is of another kind.
    """
    if not isinstance(source, FileSource):
        found = "has no data source" if source is None else f"has a {type(source).__name__}"
        raise ConfigurationError("feature views", [Problem(where, found, "a FileSource, Parquet or Delta")])
    return source


def path_of(source: FileSource, repository: Path | str | None) -> str:
    """The absolute path, or the URL, of a source."""
    return str(FileSource.get_uri_for_file_path(repository, source.path)).removeprefix("file://")


def filesystem_of(source: FileSource, path: str) -> tuple[Any, str]:
    """Arrow's file system of a path, None for the local one, and the path in it."""
    found, inside = FileSource.create_filesystem_and_path(
        path, source.s3_endpoint_override or "", resolved_credentials=source.resolve_credentials()
    )
    return found, inside


def options(source: FileSource) -> dict[str, str]:
    """What deltalake must know to reach a source."""
    known = {**os.environ, **(source.resolve_credentials() or {})} if "://" in source.path else {}
    found = {name: str(value) for name, value in known.items() if name.startswith("AWS_")}
    return {**found, "AWS_ENDPOINT_URL": source.s3_endpoint_override} if source.s3_endpoint_override else found
