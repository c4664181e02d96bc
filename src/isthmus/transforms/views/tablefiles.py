"""The Parquet files of a view's offline table, for engines without a Delta jar."""

from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable

from isthmus.features.contract.schema import ViewContract
from isthmus.features.offline.history import table_schema
from isthmus.transforms.tables.stored import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TOGETHER = 16


def history(spark: "SparkSession", view: ViewContract, store: Store, version: int) -> "DataFrame":
    """Return a DataFrame of a view's offline table at a Delta version. Columns that older files lack are null."""
    paths = [f"{view.table}/{file}" for file in files(store, view, version)]
    return store.read(spark, paths, table_schema(view), together=_TOGETHER)


def files(store: Store, view: ViewContract, version: int) -> list[str]:
    """Return the paths of a view's files in its table's folder, at a Delta version."""
    table = DeltaTable(f"{store.root}/{view.table}", version=version, storage_options=dict(store.options) or None)
    return sorted(pa.table(table.get_add_actions())["path"].to_pylist())
