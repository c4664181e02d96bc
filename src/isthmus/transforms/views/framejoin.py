"""The point-in-time join of DataFrames: for spines that are themselves computed by an engine, and stay there.

One way for Sail, Apache Spark and Spark Connect, in plain DataFrame operations, so executors need nothing installed.
The rows of a view and of the spine are one union, shuffled once by key and sorted once by moment. A row can be used
from `max(event, known)` on, and the answer is the greatest (event, known, content) so far: one running maximum.
`features.pointintime.join_naively` is the oracle.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable

from isthmus.features.clock import Status
from isthmus.features.contract.contract import Column, ViewContract
from isthmus.features.errors import DataError
from isthmus.features.offline.history import status_column
from isthmus.transforms.engine import is_apache
from isthmus.transforms.views.compute import SPARK

if TYPE_CHECKING:
    from pyspark.sql import Column as Expression
    from pyspark.sql import DataFrame, SparkSession

_TURN = "_turn"
_INTEGERS = ("int", "bigint", "smallint", "tinyint")


def history(spark: "SparkSession", view: ViewContract, files: Sequence[str]) -> "DataFrame":
    """The rows of a view's offline table, read by the engine from the files of one version.

    Args:
        spark: the session to read with; its executors reach the files by their paths.
        view: the view.
        files: what `files` says.
    """
    columns = [*view.keys, *view.fields]
    types = {column.name: SPARK[column.dtype.name] for column in columns}
    types |= {"event_timestamp": "timestamp", "known_at": "timestamp", "content_hash": "bigint"}
    schema = ", ".join(f"`{name}` {dtype}" for name, dtype in types.items())
    if not files:
        return spark.createDataFrame([], schema)
    # With its schema told, the engine opens no file before it runs, and a column that older files lack is null.
    return spark.read.schema(schema).parquet(*files)


def files(path: str, version: int) -> list[str]:
    """Paths of the Parquet files of a Delta table at a version. The driver reads the log, so engines need no jar."""
    table = DeltaTable(path, version=version)
    if "://" in path:
        return sorted(table.file_uris())
    # As a URI, a path with a blank or an umlaut would be another one.
    return sorted(f"{path}/{file}" for file in pa.table(table.get_add_actions())["path"].to_pylist())


def point_in_time(spine: "DataFrame", histories: Sequence[tuple[ViewContract, "DataFrame"]]) -> "DataFrame":
    """Joins views to a spine by the time rules, without running anything yet.

    Args:
        spine: one row per question, with `event_timestamp` (timestamp, no nulls) and the join keys. It is read once.
        histories: the views to join, each with all its rows.

    Returns:
        The spine's rows, all of them, in no order, with all their columns, followed by `<view>__<feature>` columns and
        a `<view>__status` column (present, null, expired, not_found) for each view.

    Raises:
        DataError: the spine lacks a column, a column has another type than the view's key, or two columns of the
            result would share a name.
    """
    _check_spine(spine, [view for view, _ in histories])
    result = spine
    for view, rows in histories:
        result = _join(result, view, rows)
    return result


def _join(spine: "DataFrame", view: ViewContract, rows: "DataFrame") -> "DataFrame":
    """One view joined to a spine: one shuffle and one sort."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import LongType, StructField, StructType

    turns, keys = [_TURN, *(f"_key{n}" for n in range(len(view.keys)))], [_comparable(key) for key in view.keys]
    # A sort that begins with a number compares the texts behind it only where the numbers are equal.
    turn = [column.alias(name) for column, name in zip([F.xxhash64(*keys), *keys], turns, strict=True)]
    event, known = F.unix_micros("event_timestamp"), F.unix_micros("known_at")
    order = [event.alias("_event"), known.alias("_known"), F.col("content_hash").alias("_content")]
    types = rows.schema
    offer = [StructField(name, LongType()) for name in ("_event", "_known", "_content")]
    offer += [types[column.name] for column in view.fields]
    questions = spine.select(
        *turn, event.alias("_since"), F.lit(1).alias("_asks"), F.struct(*map(_quoted, spine.columns)).alias("_spine"),
        F.lit(None).cast(StructType(offer)).alias("_offer"),
    )  # fmt: skip
    offered = rows.select(
        *turn, F.greatest(event, known).alias("_since"), F.lit(0).alias("_asks"),
        F.lit(None).cast(spine.schema).alias("_spine"),
        F.struct(*order, *(_quoted(column.name) for column in view.fields)).alias("_offer"),
    )  # fmt: skip
    union = questions.union(offered)
    won = (_greatest if is_apache(spine.sparkSession) else _last_winner)(union, turns)
    carried = [F.col("_spine")[name].alias(name) for name in spine.columns]
    return won.where(F.col("_asks") == 1).select(*carried, *_answers(view, F.col("_winner")))


def _greatest(union: "DataFrame", turns: Sequence[str]) -> "DataFrame":
    """The rule as it reads: the greatest row so far."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    so_far = Window.partitionBy(*turns).orderBy("_since", "_asks")
    so_far = so_far.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return union.select("_since", "_asks", "_spine", F.max("_offer").over(so_far).alias("_winner"))


def _last_winner(union: "DataFrame", turns: Sequence[str]) -> "DataFrame":
    """The same in two passes, for Sail, which takes four times as long over the maximum of whole rows.

    Of two rows of one event, the one that can be used later is known later; so in the order (usable from, event, known,
    content) a row wins when it becomes usable if no row before it has a later event, and has lost for good otherwise.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    event, known, content = (F.col("_offer")[name] for name in ("_event", "_known", "_content"))
    so_far = Window.partitionBy(*turns).orderBy("_since", "_asks", event, known, content)
    so_far = so_far.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    union = union.select("*", F.max(event).over(so_far).alias("_best"))
    won = F.when(event == F.col("_best"), F.col("_offer"))
    return union.select("_since", "_asks", "_spine", F.last(won, ignorenulls=True).over(so_far).alias("_winner"))


def _answers(view: ViewContract, winner: "Expression") -> "list[Expression]":
    """The features and the status of a view, from its last winner."""
    from pyspark.sql import functions as F  # noqa: N812

    event = winner["_event"]
    late = F.lit(False) if view.ttl is None else F.col("_since") - event > F.lit(view.ttl)
    empty = F.lit(True)
    for column in view.fields:
        empty = empty & winner[column.name].isNull()
    status = (
        F.when(event.isNull(), Status.NOT_FOUND.label)
        .when(late, Status.EXPIRED.label)
        .when(empty, Status.NULL.label)
        .otherwise(Status.PRESENT.label)
    )
    features = [F.when(~late, winner[column.name]).alias(view.full_name(column.name)) for column in view.fields]
    return [*features, status.alias(status_column(view))]


def _comparable(key: Column) -> "Expression":
    """A key as both sides have it: whole numbers at their widest, so that one that is too great equals none."""
    from pyspark.sql.types import LongType

    column = _quoted(key.name)
    return column.cast(LongType()) if SPARK[key.dtype.name] in _INTEGERS else column


def _quoted(name: str) -> "Expression":
    from pyspark.sql import functions as F  # noqa: N812

    return F.col(f"`{name}`")


def _check_spine(spine: "DataFrame", views: Sequence[ViewContract]) -> None:
    taken = list(spine.columns)
    types = dict(spine.dtypes)
    needed = {"event_timestamp": "timestamp"}
    for view in views:
        needed |= {column.name: SPARK[column.dtype.name] for column in view.keys}
        added = [*(view.full_name(column.name) for column in view.fields), status_column(view)]
        if clash := sorted({*added} & {*taken}):
            raise DataError("spine", f"has a column {clash[0]}",
                            expected="no column named like a feature, and each view once")  # fmt: skip
        taken += added
    for name, wanted in needed.items():
        if spine.columns.count(name) != 1:
            raise DataError("spine", f"has {spine.columns.count(name)} columns {name}", expected="one")
        if types[name] != wanted and not (types[name] in _INTEGERS and wanted in _INTEGERS):
            raise DataError(f"spine, {name}", f"has type {types[name]}", expected=wanted)
