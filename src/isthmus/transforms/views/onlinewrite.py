"""Write a view's latest rows to Redis from the engine's executors. Running a task again is safe."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.errors import DependencyError
from isthmus.features.offline.history import table_schema
from isthmus.features.offline.scan import rebatch
from isthmus.features.online.store import OnlineStore, WriteCounts
from isthmus.features.publishing.publish import PART, write_rows
from isthmus.features.redis.address import without_credentials
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.transforms.sources import first_line
from isthmus.transforms.tables.missing import explain_missing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_COUNTS = ("compared", "changed", "written")


def latest(view: ViewContract, rows: "DataFrame", at: int) -> "DataFrame":
    """Keep the row of each key that Redis should serve: the latest one that happened and was known by the time `at`.

    `at` is in microseconds since 1970 UTC. `rows` is the view's offline table. Rows older than the view's ttl are kept,
    too.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    visible = (F.unix_micros("event_timestamp") <= at) & (F.unix_micros("known_at") <= at)
    newest = [F.col(name).desc() for name in ("event_timestamp", "known_at", "content_hash")]
    order = Window.partitionBy(*(f"`{key.name}`" for key in view.keys)).orderBy(*newest)
    ranked = rows.where(visible).withColumn("_rank", F.row_number().over(order))
    return ranked.where("_rank = 1").select(*(f"`{name}`" for name in table_schema(view).names))


def write_online(
    rows: "DataFrame", view: ViewContract, contract: Contract, url: str, horizon: int | None
) -> list[WriteCounts]:
    """Write a view's rows from the engine's executors to Redis at `url`. Return the counts of each partition with rows.

    A newer row in Redis stays. But if `horizon` is set, rows replace even a newer row that was known by then, because
    the offline table no longer has that row. `horizon` is the latest known time in the offline table, in microseconds
    since 1970 UTC. The URL may contain a password, so it travels inside a pickled function and no plan or log of the
    engine shows it. Raises DependencyError if an executor fails, for example because it cannot reach Redis. Some rows
    may be written then. Calling it again is safe.
    """
    from pyspark.errors import PySparkException

    # The executors need only this view. Keys in Redis depend on the names of project and view.
    single = Contract(contract.project, {view.name: view}, {}, {}, {})
    columns = rows.select(*(f"`{name}`" for name in table_schema(view).names))
    write = _Write(single.dumps(), view.name, url, horizon)
    where = f"writing {view.name} to Redis at {without_credentials(url)}"
    try:
        with explain_missing(where):
            counted = columns.mapInArrow(write, ", ".join(f"{name} bigint" for name in _COUNTS)).toArrow()
    except PySparkException as error:
        raise DependencyError(
            where, f"an executor failed ({first_line(error)})",
            remedy="run `isthmus materialize` again, which writes only what is missing",
        ) from None  # fmt: skip
    return [WriteCounts(**row) for row in counted.to_pylist()]


def total(parts: Sequence[WriteCounts]) -> WriteCounts:
    return WriteCounts(*(sum(getattr(part, name) for part in parts) for name in _COUNTS))


@dataclass(eq=False, repr=False)
class _Write:
    """The function that an executor runs on a partition. Its repr must not show the URL."""

    contract: bytes
    view: str
    url: str
    horizon: int | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        contract = Contract.loads(self.contract)
        view = contract.view(self.view)
        done = []
        with translate_errors(self.url):
            client = None
            try:
                # The batches of engines may have only a thousand rows.
                for part in rebatch(batches, PART):
                    if client is None:
                        client = connect(self.url)
                    rows = part.cast(table_schema(view))
                    done.append(write_rows(OnlineStore(client, contract), view, rows, self.horizon))
            finally:
                if client is not None:
                    client.close()
        if done:
            counts = total(done)
            yield pa.RecordBatch.from_pydict({name: [getattr(counts, name)] for name in _COUNTS})
