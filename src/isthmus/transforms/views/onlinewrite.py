"""What changed in a history, what is latest in it, and how it gets to Redis: by the engine, never through the driver.

The executors write with `OnlineStore`, the same rows by the same rules as any other writer, so they need this package
installed and a way to Redis. A task that the engine runs twice writes the same rows twice, which changes nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from isthmus.features.contract.contract import Contract, ViewContract
from isthmus.features.errors import DependencyError
from isthmus.features.offline.history import table_schema
from isthmus.features.online.store import OnlineStore, WriteCounts
from isthmus.features.publishing.publish import write_rows
from isthmus.features.redis.address import without_credentials
from isthmus.features.redis.connection import answering, connect
from isthmus.transforms.sources import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART = 1 << 16
"""Rows that an executor writes at a time: engines hand over as few as a thousand."""

_COUNTS = ("compared", "changed", "written")


def latest(view: ViewContract, rows: "DataFrame", at: int) -> "DataFrame":
    """The row that each key answers with at time `at`, expired ones included, in no order.

    Args:
        view: the view.
        rows: its history.
        at: microseconds since 1970 UTC.

    Returns:
        The columns of the table: keys, `event_timestamp`, `known_at`, features, `content_hash`.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    visible = (F.unix_micros("event_timestamp") <= at) & (F.unix_micros("known_at") <= at)
    newest = [F.col(name).desc() for name in ("event_timestamp", "known_at", "content_hash")]
    order = Window.partitionBy(*(f"`{key.name}`" for key in view.keys)).orderBy(*newest)
    ranked = rows.where(visible).withColumn("_rank", F.row_number().over(order))
    return ranked.where("_rank = 1").select(*(f"`{name}`" for name in table_schema(view).names))


def changes(view: ViewContract, before: "DataFrame", after: "DataFrame") -> "DataFrame":
    """The rows that one version of a history has and the other has not, in no order.

    To read little, give only the rows of files that are not in both versions: a file never changes.

    Returns:
        The columns of the table and `change`: "added" to `after`, or "removed" from `before`. A row whose values were
        corrected in place is both.
    """
    from pyspark.sql import functions as F  # noqa: N812

    names = [f"`{name}`" for name in table_schema(view).names]
    identity = [key.name for key in view.keys] + ["event_timestamp", "known_at", "content_hash"]
    added = after.select(*names).join(before.select(*identity), identity, "left_anti").select(*names)
    removed = before.select(*names).join(after.select(*identity), identity, "left_anti").select(*names)
    return added.withColumn("change", F.lit("added")).union(removed.withColumn("change", F.lit("removed")))


def write_online(
    rows: "DataFrame", view: ViewContract, contract: Contract, url: str, horizon: int | None
) -> list[WriteCounts]:
    """Writes the rows of a DataFrame to Redis by the executors.

    The URL travels inside the pickled function, which no plan, log or web page of an engine shows as text.

    Args:
        rows: at most one row per key, as `latest` gives them.
        view: the view.
        contract: the project's contract.
        url: the Redis, as the executors reach it.
        horizon: as `OnlineStore.write` takes it.

    Returns:
        What each partition that held rows did.

    Raises:
        DependencyError: the engine failed, for example because an executor cannot reach Redis or lacks this package.
    """
    from pyspark.errors import PySparkException

    # The view alone is enough for the executors, and names of the same project are names of the same keys.
    own = Contract(contract.project, {view.name: view}, {}, {}, {})
    chosen = rows.select(*(f"`{name}`" for name in table_schema(view).names))
    write = _Write(own.dumps(), view.name, url, horizon)
    try:
        counted = chosen.mapInArrow(write, ", ".join(f"{name} bigint" for name in _COUNTS)).toArrow()
    except PySparkException as error:
        raise DependencyError(
            f"writing {view.name} to Redis at {without_credentials(url)}", f"an executor failed ({first_line(error)})",
            remedy="run `isthmus materialize` again, which writes only what is missing",
        ) from None  # fmt: skip
    return [WriteCounts(**row) for row in counted.to_pylist()]


def total(parts: Sequence[WriteCounts]) -> WriteCounts:
    """What all partitions did together."""
    return WriteCounts(*(sum(getattr(part, name) for part in parts) for name in _COUNTS))


class _Write:
    """The function that an executor runs on a partition. It shows nothing of itself."""

    def __init__(self, contract: bytes, view: str, url: str, horizon: int | None) -> None:
        self._contract, self._view, self._url, self._horizon = contract, view, url, horizon

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        contract = Contract.loads(self._contract)
        view = contract.view(self._view)
        done = []
        with answering(self._url):
            client = None
            try:
                for part in _parts(view, batches):
                    if client is None:
                        client = connect(self._url)
                    done.append(write_rows(OnlineStore(client, contract), view, part, self._horizon))
            finally:
                if client is not None:
                    client.close()
        if done:
            counts = total(done)
            yield pa.RecordBatch.from_pydict({name: [getattr(counts, name)] for name in _COUNTS})


def _parts(view: ViewContract, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows of a partition in the types of the view, many at a time."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(map(len, held)) >= PART:
            yield pa.Table.from_batches(held).cast(table_schema(view))
            held = []
    if any(map(len, held)):
        yield pa.Table.from_batches(held).cast(table_schema(view))
