"""Find and write the changed rows of a view on the engine's executors. A task may safely run twice."""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.errors import DependencyError
from isthmus.features.offline.history import LatestRows, ViewHistory, table_schema
from isthmus.features.online.record import NEVER, Published
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.changes import (
    Facts,
    Find,
    KeyChanges,
    ViewChanges,
    WriteSelection,
    WriteTotals,
    names,
    require_record,
)
from isthmus.features.redis.address import without_credentials
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.values.arrow import micros
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.views.executors import refused, result, run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Declared names begin with a letter.
_SIDE, _UNTIL, _SHOWN, _RANK = "_side", "_until", "_shown", "_rank"
_TOGETHER = 16
"""Files that a task reads."""
_REMEDY = "run `isthmus materialize` again, which writes only what is missing"
_Sum = TypeVar("_Sum", Facts, WriteTotals)


def latest(view: ViewContract, sides: Sequence[tuple["DataFrame", int]]) -> "DataFrame":
    """Return the row of each key that Redis should serve, for each side: its latest row at the time of the side.

    A side is the rows of one version of the view's offline table, and a time in microseconds since 1970 UTC. A row
    counts if it happened and was known by that time, even if it is older than the view's ttl. The result has all rows
    of a key in one partition, with three more columns: `_side`, the number of the side; `_until`, the latest known time
    of the key's rows up to the time of the side; and `_shown`, False if no row of the key counts. The key then has an
    arbitrary row.
    """
    from pyspark.sql import DataFrame, Window
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    def marked(side: int, rows: DataFrame, at: int) -> DataFrame:
        known = F.unix_micros("known_at")
        shown = (F.unix_micros("event_timestamp") <= at) & (known <= at)
        return rows.withColumns({_SIDE: F.lit(side), _SHOWN: shown, _UNTIL: F.when(known <= at, known)})

    both = [marked(side, rows, at) for side, (rows, at) in enumerate(sides)]
    rows = reduce(partial(DataFrame.unionByName, allowMissingColumns=True), both)
    keys = [f"`{key.name}`" for key in view.keys]
    newest = [F.col(name).desc() for name in (_SHOWN, "event_timestamp", "known_at", "content_hash")]
    window = Window.partitionBy(*keys, _SIDE)
    ranks = {_UNTIL: F.max(_UNTIL).over(window), _RANK: F.row_number().over(window.orderBy(*newest))}
    return rows.withColumns(ranks).where(F.col(_RANK) == 1).drop(_RANK).repartition(*keys)


def rows_of(spark: "SparkSession", store: Store, history: ViewHistory, *, values: bool = True) -> "DataFrame":
    """Read a version of a view's offline table in `store` as a DataFrame, with its features if `values`."""
    features = () if values else [column.name for column in history.view.fields]
    schema = pa.schema([field for field in table_schema(history.view) if field.name not in features])
    return store.read(spark, [f"{history.view.table}/{file}" for file in history.files], schema, together=_TOGETHER)


def finder(spark: "SparkSession", store: Store, contract: Contract, url: str) -> Find:
    """Return the `find` of `publish` that finds and writes rows on the engine's executors.

    The executors read the tables in `store`, and write to Redis at `url`. The URL may contain a password, so it travels
    inside a pickled function: no plan or log of the engine shows it. `publish` raises DependencyError if an executor
    fails, for example because it cannot reach Redis. Some rows may be written then, and it is safe to publish again.
    """
    from pyspark.errors import PySparkException

    @contextmanager
    def find(history: ViewHistory, at: int, base: tuple[ViewHistory, int] | None) -> Iterator[ViewChanges]:
        view = history.view
        # Apache Spark already looks for the files here: those of `base` may be gone.
        with refused(_place(view, url), DependencyError, _REMEDY):
            sides = [(rows_of(spark, store, history), at)]
            if base is not None and (base[0] is not history or base[1] != at):
                sides.append((rows_of(spark, store, base[0], values=False), base[1]))
            rows = latest(view, sides).persist()
        # The executors need only this view. Keys in Redis depend on the names of project and view.
        single = Contract(contract.project, {view.name: view}, {}, {}, {})
        try:
            yield _Executors(rows, _Task(single, view, url, [at for _, at in sides], compare=base is not None))
        finally:
            with suppress(PySparkException):  # an engine that is gone has no rows
                rows.unpersist()

    return find


def _place(view: ViewContract, url: str) -> str:
    return f"writing {view.name} to Redis at {without_credentials(url)}"


@dataclass(frozen=True, repr=False)
class _Executors:
    rows: "DataFrame"
    task: "_Task"

    def facts(self, record: Published | None) -> Facts:
        return self._sum(Facts(), self.rows, partial(_on_part, method=partial(KeyChanges.facts, record=record)))

    def write(self, selection: WriteSelection, require: Callable[[], None]) -> WriteTotals:
        require()
        return self._sum(
            WriteTotals(), self.rows, partial(_on_part, method=partial(KeyChanges.write, selection=selection))
        )

    def remove_others(self, record: bytes | None, horizon: int) -> int:
        stored = self.rows.sparkSession.range(0, 1, 1, 1).mapInArrow(replace(self.task, work=_stored), "name binary")
        own = self.rows.mapInArrow(replace(self.task, work=_own), "name binary")
        others = stored.join(own, "name", "left_anti")
        return self._sum(WriteTotals(), others, partial(_remove, record=record, horizon=horizon)).removed

    def _sum(self, zero: _Sum, rows: "DataFrame", work: Callable[..., Iterator[pa.RecordBatch]]) -> _Sum:
        place = _place(self.task.view, self.task.url)
        parts = run(place, rows, replace(self.task, work=work), DependencyError, _REMEDY)
        return reduce(add, (msgspec.convert(each, type(zero)) for each in parts), zero)


@dataclass(frozen=True, eq=False, repr=False)
class _Task:
    """Function that an executor calls with a partition of `latest`. Its repr must not show the URL.

    `at` has the time of each side. With `compare`, the last side has the rows of the last run. Empty partitions are
    skipped.
    """

    contract: Contract
    view: ViewContract
    url: str
    at: Sequence[int]
    compare: bool
    work: Callable[..., Iterator[pa.RecordBatch]] = lambda *_: iter(())

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        batches = iter(batches)
        if (first := next(batches, None)) is None:
            return
        try:
            with translate_errors(self.url), connect(self.url) as client:
                yield from self.work(self, OnlineStore(client, self.contract), chain([first], batches))
        except DependencyError as error:
            where = f"{without_credentials(self.url)} on executor {socket.gethostname()}"
            raise DependencyError(where, error.found) from None

    def part(self, batches: Iterable[pa.RecordBatch]) -> KeyChanges:
        rows = pa.Table.from_batches(batches)
        sides = [self._latest(rows.filter(pc.equal(rows[_SIDE], side)), at) for side, at in enumerate(self.at)]
        return KeyChanges(sides[0], sides[-1] if self.compare else None)

    def _latest(self, rows: pa.Table, at: int) -> LatestRows:
        schema, until = table_schema(self.view), pc.max(rows[_UNTIL]).as_py()
        shown = rows.filter(rows[_SHOWN]).select(schema.names).cast(schema)
        event, known = micros(shown["event_timestamp"]), micros(shown["known_at"])
        keys, content = shown.select([key.name for key in self.view.keys]), shown["content_hash"].to_numpy()
        history, places = ViewHistory(self.view, shown, 0), np.arange(len(shown))
        return LatestRows(history, at, keys, event, known, content, places, NEVER if until is None else until)


def _on_part(
    task: _Task, store: OnlineStore, batches: Iterator[pa.RecordBatch], method: Callable[..., Facts | WriteTotals]
) -> Iterator[pa.RecordBatch]:
    yield result(msgspec.to_builtins(method(task.part(batches), store)))


def _remove(
    task: _Task, store: OnlineStore, batches: Iterator[pa.RecordBatch], record: bytes | None, horizon: int
) -> Iterator[pa.RecordBatch]:
    removed = 0
    for keys in chain((batch.column(0).to_pylist() for batch in batches), [[]]):
        require_record(store, task.view, record)
        removed += store.remove_names(task.view, [keys], horizon)
    yield result({"removed": removed})


def _own(task: _Task, store: OnlineStore, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield _named(names(store, task.view, task.part(batches).now.keys))


def _stored(task: _Task, store: OnlineStore, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        yield from map(_named, store.names(task.view))


def _named(keys: Sequence[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"name": pa.array(keys, pa.binary())})
