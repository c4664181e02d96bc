"""Feast's file sources: their paths, access through deltalake and Arrow, and writing tables to them."""

import os
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq
from deltalake import write_deltalake
from feast import FeatureView
from feast.data_format import DeltaFormat
from feast.data_source import DataSource
from feast.infra.offline_stores.file_source import FileSource
from feast.repo_config import RepoConfig

from isthmus.features.errors import ConfigurationError, Problem, RequestError
from isthmus.features.files import publish, require_delta, write_atomically

OFFLINE = "isthmus.offline"
"""The tag of a registered view with the path from the registry to the folder of its table."""


def file_source(source: DataSource | None, where: str) -> FileSource:
    if not isinstance(source, FileSource):
        problem = "has no data source" if source is None else f"has a {type(source).__name__}"
        raise ConfigurationError("feature views", [Problem(where, problem, "a FileSource, Parquet or Delta")])
    return source


def own_source(config: RepoConfig, view: FeatureView) -> FileSource:
    """Return the file source of a view, to read its rows. Raise ConfigurationError if its source is not a file.

    `isthmus apply` tags a view with its table's path, relative to Feast's registry. If that table exists, the result is
    a copy of the source with this path, so that a copied project reads its own table.
    """
    source = file_source(view.batch_source, f"view {view.name}")
    if OFFLINE not in view.tags or config.registry.registry_type != "file" or "://" in config.registry.path:
        return source
    registry = Path(config.repo_path or "", config.registry.path)
    table = registry.parent / view.tags[OFFLINE] / Path(source.path).name
    if not table.exists():
        return source
    own = copy(source)
    own.file_options = copy(source.file_options)
    own.file_options.uri = str(table)
    return own


def path_of(source: FileSource, repository: Path | str | None) -> str:
    path = str(FileSource.get_uri_for_file_path(repository, source.path)).removeprefix("file://")
    delta = isinstance(source.file_format, DeltaFormat)
    return require_delta(f"file source {source.name}", path, "rename the folder") if delta else path


def filesystem_of(source: FileSource, path: str) -> tuple[Any, str]:
    filesystem, inside = FileSource.create_filesystem_and_path(
        path, source.s3_endpoint_override or "", resolved_credentials=source.resolve_credentials()
    )
    # Arrow finds nothing at a remote path that ends in a slash.
    return filesystem, inside if filesystem is None else inside.rstrip("/")


def endpoint(options: Mapping[str, str] | None) -> str | None:
    names = ("aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint")
    return next((value for name, value in (options or {}).items() if name.lower() in names), None)


def storage_options(source: FileSource) -> dict[str, str]:
    known = {**os.environ, **(source.resolve_credentials() or {})} if "://" in source.path else {}
    options = {name: str(value) for name, value in known.items() if name.startswith("AWS_")}
    if source.s3_endpoint_override:
        # Feast has no option for a server without TLS; only the URL shows it.
        plain = {"AWS_ALLOW_HTTP": "true"} if source.s3_endpoint_override.startswith("http://") else {}
        options = {**plain, **options, "AWS_ENDPOINT_URL": source.s3_endpoint_override}
    return options


def save(table: pa.Table, target: FileSource, path: str) -> None:
    """Write a table to `path`, and replace the Parquet file, Parquet folder or Delta table that is there.

    Local files and folders, and Delta tables, are replaced atomically. A path without `.parquet` is a folder that then
    has only the file `0.parquet`. Raise RequestError if a remote folder has other files, which would stay.
    """
    filesystem, inside = filesystem_of(target, path)
    if isinstance(target.file_format, DeltaFormat):
        write_deltalake(path, table, mode="overwrite", schema_mode="overwrite", storage_options=storage_options(target))
    elif filesystem is not None:
        file = inside if inside.endswith(".parquet") else f"{inside}/0.parquet"
        if file != inside:
            entries = filesystem.get_file_info(fs.FileSelector(inside, allow_not_found=True, recursive=True))
            if others := [entry.path for entry in entries if entry.is_file and entry.path != file]:
                raise RequestError(path, f"holds other files, for example {others[0]}, which would stay",
                                   remedy="delete them, or save to a path that ends in .parquet")  # fmt: skip
        pq.write_table(table, file, filesystem=filesystem)
    elif inside.endswith(".parquet"):
        write_atomically(Path(inside), parquet(table))
    else:
        publish(Path(inside), lambda folder: pq.write_table(table, folder / "0.parquet"))


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content
