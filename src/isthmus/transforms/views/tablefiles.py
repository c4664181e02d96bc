"""The Parquet files of a view's offline table, for engines without a Delta jar."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable

from isthmus.features.contract.schema import ViewContract
from isthmus.transforms.tables import parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def history(spark: "SparkSession", view: ViewContract, files: Sequence[str]) -> "DataFrame":
    columns = [*view.keys, *view.fields]
    types = {column.name: column.dtype.spark for column in columns}
    types |= {"event_timestamp": "timestamp", "known_at": "timestamp", "content_hash": "bigint"}
    schema = ", ".join(f"`{name}` {dtype}" for name, dtype in types.items())
    if not files:
        return spark.createDataFrame([], schema)
    # With a schema, the engine opens no file before it runs, and columns missing from older files are null.
    return parquet.read(spark, *files, schema=schema)


def files(path: str, version: int, storage_options: Mapping[str, str] | None = None) -> list[str]:
    table = DeltaTable(path, version=version, storage_options=dict(storage_options or {}) or None)
    if "://" in path:
        return sorted(table.file_uris())
    # As a URI, a path with a blank or an umlaut would be encoded.
    return sorted(f"{path}/{file}" for file in pa.table(table.get_add_actions())["path"].to_pylist())
