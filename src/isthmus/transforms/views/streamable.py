"""Check which views a stream can keep up to date: a key's rows must depend on its own earlier events alone."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import FIRST, LAST
from isthmus.features.definition.spec import FeatureView, Source
from isthmus.features.errors import Problem, one_of
from isthmus.features.streams.formats import EventDecoder
from isthmus.features.streams.tiles import TileState
from isthmus.features.streams.window import distinct_keys, has_key
from isthmus.features.values.arrow import micros
from isthmus.transforms.views.compute import Frames, stream_view, tile_events, with_known_at
from isthmus.transforms.views.difference import difference, sort_rows
from isthmus.transforms.views.events import columns_of, events_frame, events_of, latest
from isthmus.transforms.views.tiles import marked, uses_other_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS = 3
"""Number of keys whose rows are computed from their own events."""
PARTS = 3
"""Number of parts in which tiles get their events."""


def stream_problems(
    spark: "SparkSession", view: FeatureView, contract: ViewContract, frames: Frames, root: Path
) -> Iterator[Problem]:
    """Yield the reasons why `isthmus stream` cannot keep a view up to date.

    Call it only for a view that reads a stream. Computes rows from the latest events of the source's data, for some
    keys, drawn with a fixed seed. Finds nothing if the source has no rows. `frames` has the DataFrames of the sources.
    Schema files of the stream's format are below `root`. Raises ConfigurationError if such a file cannot be read, or
    events cannot have a column's type.
    """
    where, source = f"view {view.name}", view.streams[0]
    columns = frames[source.name].columns
    if missing := [key.name for key in contract.keys if key.name not in columns]:
        yield Problem(f"{where}, source {source.name}", f"has no column {missing[0]!r}",
                      f"the join keys of the view among {one_of(columns)}",
                      "add the key to the events, or leave stream= out")  # fmt: skip
        return
    event_decoder(source, columns_of(frames[source.name]), root)
    if view.tiling is not None:
        assert view.function is not None  # noqa: S101 - a contract without functions does not compile
        arguments = {each.name: frames[each.name] for each in view.sources}
        result = view.function(**{**arguments, source.name: marked(frames[source.name])})
        if operation := uses_other_rows(result):
            yield Problem(
                where, f"its function combines rows of {source.name} (the operation {operation!r})",
                "an event from each row on its own", "aggregate with tiles=, not in the function",
            )  # fmt: skip
            return
    with TemporaryDirectory(prefix="isthmus-") as folder:
        yield from _drawn_problems(spark, view, contract, source, frames, Path(folder))


def event_decoder(source: Source, columns: pa.Schema, root: Path, keys: Sequence[str] = ()) -> EventDecoder:
    """Return the decoder of a source's stream. `columns` are those of the source's data; `keys` must not be null."""
    assert source.stream is not None  # noqa: S101 - the caller asks only for such sources
    times = [name for name in (source.timestamp, source.known) if name is not None]
    return EventDecoder(source.name, columns, [*times, *keys], source.stream.format, root)


def _drawn_problems(
    spark: "SparkSession", view: FeatureView, contract: ViewContract, source: Source, frames: Frames, folder: Path
) -> Iterator[Problem]:
    where, timestamp, known = f"view {view.name}", source.timestamp or "", source.known_column
    if (end := latest(frames[source.name], timestamp)) is None:
        return
    events = events_of(frames[source.name], source, end - 2 * (contract.lookback or 0) - 1, end + 1)
    # A stream has no events without times.
    events = events.filter(pc.and_(pc.is_valid(events[timestamp]), pc.is_valid(events[known])))

    def rows(part: pa.Table) -> pa.Table:
        with events_frame(spark, part, folder) as frame:
            tables = list(stream_view(view, contract, {**frames, source.name: frame}, (FIRST, LAST)))
        return pa.concat_tables(tables) if tables else pa.table({})

    complete = rows(events)
    if not len(complete):
        return
    names = [key.name for key in contract.keys]
    for name in names:
        if events[name].type != complete[name].type:
            yield Problem(
                f"{where}, source {source.name}", f"column {name!r} has type {events[name].type}",
                f"{complete[name].type}, as the join key", "cast it at the writer of the events, not in the transform",
            )  # fmt: skip
            return
    keys = distinct_keys(complete, names)
    chosen = keys.take(pa.array(np.random.default_rng(0).permutation(len(keys))[:KEYS]))
    of_keys = complete.filter(has_key(complete, chosen))
    alone = rows(events.filter(has_key(events, chosen)))
    if found := difference(contract, sort_rows(contract, [of_keys]), sort_rows(contract, [alone])):
        yield Problem(where, f"a key's rows depend on events of other keys: computed from its own events, {found}",
                      "the same rows", "aggregate by the join keys, or leave stream= of its source out")  # fmt: skip
        return
    cut = int(np.median(micros(events[known])))
    if view.tiling is not None:
        later = timedelta(microseconds=int((micros(events[known]) - micros(events[timestamp])).max()))
        longest = max(view.tiling.windows)
        if longest + later > timedelta(microseconds=contract.lookback or 0):
            yield Problem(
                f"{where}, lookback", f"events become known up to {later} after their time, and a window is {longest}",
                f"{longest + later} or more", "declare a longer lookback=",
            )  # fmt: skip
            return
        with events_frame(spark, events, folder) as frame:
            times = tile_events(view, contract, {**frames, source.name: frame})["known_at"]
        if not pc.all(pc.is_in(times, value_set=events[known].cast(times.type).unique())).as_py():
            yield Problem(where, f"its function returns other times than {known}", f"{known} as it is in {source.name}",
                          "return that column, and no known_at of your own")  # fmt: skip
            return
        tiles = rows_from_tiles(view, contract, source, frames, events, folder)
        tiles = tiles.filter(has_key(tiles, chosen))
        if found := difference(contract, sort_rows(contract, [of_keys]), sort_rows(contract, [tiles])):
            yield Problem(
                where, f"an event that its function returns depends on other rows: computed in parts, {found}",
                "an event from each row on its own", "aggregate with tiles=, not in the function",
            )  # fmt: skip
            return
    moment = pa.scalar(cut, pa.timestamp("us", "UTC"))
    until = complete.filter(pc.less(complete["known_at"], moment))
    before = rows(events.filter(pc.less(events[known], moment)))
    before = before.filter(pc.less(before["known_at"], moment)) if len(before) else before
    if not len(until) and not len(before):
        return
    if found := difference(contract, sort_rows(contract, [until]), sort_rows(contract, [before])):
        yield Problem(where, f"rows depend on events that became known after known_at: without them, {found}",
                      f"rows that use only events whose {known} is not after known_at",
                      f"compute times from {known}, return known_at, or declare a longer delay=")  # fmt: skip


def rows_from_tiles(
    view: FeatureView, contract: ViewContract, source: Source, frames: Frames, events: pa.Table, folder: Path
) -> pa.Table:
    """Return the rows of events as `isthmus stream` computes them: from tiles, to which parts of the events are added.

    `source` is the one with the stream. The parts are drawn with a fixed seed. Large ones are written to `folder`.
    """
    assert view.tiling is not None  # noqa: S101 - only such views
    tiles, spark = TileState(contract, view.tiling), frames[source.name].sparkSession
    with events_frame(spark, events, folder) as frame:
        once = frame.toArrow()
    order = np.random.default_rng(0).permutation(len(once))
    for part in np.array_split(order, PARTS):
        with events_frame(spark, once.take(pa.array(part)), folder) as frame:
            tiles.add(tile_events(view, contract, {**frames, source.name: frame}))
    keys = distinct_keys(once, [key.name for key in contract.keys])
    return with_known_at(contract, tiles.rows(keys, FIRST))
