"""The point-in-time join by an engine: for spines and histories that no single machine should hold.

One way for Sail, Apache Spark and Spark Connect, in plain DataFrame operations, so executors need nothing installed.
The rows of a view and of the spine are one union, shuffled once by key and sorted once by moment. A row can be used
from `max(event, known)` on, and the answer is the greatest (event, known, content) so far: one running maximum.
`features.pointintime.join_naively` is the oracle.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from isthmus.features.clock import Status
from isthmus.features.contract import Column, ViewContract
from isthmus.features.errors import DataError
from isthmus.features.pointintime import status_column
from isthmus.transforms.compute import SPARK
from isthmus.transforms.engine import is_apache
from isthmus.transforms.sources import first_line

if TYPE_CHECKING:
    from pyspark.sql import Column as Expression
    from pyspark.sql import DataFrame, SparkSession

ROW = "_row"
"""The column that numbers the rows of a spine, int64. No declared name begins with an underscore."""

_PART, _PART_BITS = "_part", 20
_TURN = "_turn"
_SPAN_BITS = 36
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
    return sorted(DeltaTable(path, version=version).file_uris())


def numbered(spine: "DataFrame") -> "DataFrame":
    """The spine with a column `_row` that rises, with gaps, in the order of `compute_spine`: by time, then all columns.

    Rows are numbered within spans of 2^36 microseconds (19 hours), spans beside each other. An engine may leave out a
    sort whose effect it does not see, so the number comes from a window and not from the order of rows.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    span = F.shiftright(F.unix_micros("event_timestamp"), _SPAN_BITS)
    others = [name for name in spine.columns if name != "event_timestamp"]
    order = [_quoted(name).asc_nulls_last() for name in ("event_timestamp", *others)]
    within = F.row_number().over(Window.partitionBy("_span").orderBy(*order)).cast("bigint")
    # Four million spans take 22 bits and a sign, which leaves a span more rows than fit anywhere.
    rising = F.shiftleft("_span", 40) + within
    return spine.withColumn("_span", span).withColumn(ROW, rising).drop("_span")


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


class RefusedError(Exception):
    """What the engine said when it did not join."""


def join_files(
    spark: "SparkSession",
    spine: Path,
    histories: Sequence[tuple[ViewContract, Sequence[str]]],
    columns: Sequence[str],
    path: Path,
) -> None:
    """Joins views to a spine, all by the executors.

    Args:
        spark: the session.
        spine: a Parquet file with the join keys, `event_timestamp` and `_row`.
        histories: the views, each with the files of its table.
        columns: what to write of the result besides `_row`.
        path: the folder to write, see `write`.

    Raises:
        RefusedError: the engine failed, or cannot reach a file.
    """
    from pyspark.errors import PySparkException

    try:
        frames = [(view, history(spark, view, files)) for view, files in histories]
        joined = point_in_time(spark.read.parquet(str(spine)), frames)
        write(joined.select(*map(_quoted, (ROW, *columns))), str(path))
    except PySparkException as error:
        raise RefusedError(first_line(error)) from error


def write(result: "DataFrame", path: str) -> None:
    """Writes a joined spine that has a column `_row` as a Parquet dataset, by the executors.

    The folders `_part=0`, `_part=1` and so on, whose numbers have gaps, follow each other in the spine's order; `_row`
    stays in their files, since not every engine keeps an order that it writes. `parts` reads them.
    """
    from pyspark.sql import functions as F  # noqa: N812

    # The part follows from the row's number: neither sampling nor a second sort of everything.
    parts = result.withColumn(_PART, F.shiftright(ROW, _PART_BITS))
    ordered = parts.repartition(_PART).sortWithinPartitions(_PART, ROW)
    # Spark's default form, INT96, has neither a time zone nor, for most readers, the years before 1677.
    result.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    ordered.write.mode("overwrite").partitionBy(_PART).parquet(path)


def parts(path: Path) -> Iterator[pa.Table]:
    """The rows of a result that `write` wrote, in the spine's order, a million at a time at most."""
    folders = {int(folder.name.partition("=")[2]): folder for folder in path.glob(f"{_PART}=*")}
    for _, folder in sorted(folders.items()):
        rows = pq.read_table(folder, partitioning=None)
        yield rows.sort_by(ROW).drop_columns(ROW)


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
