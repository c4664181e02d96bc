"""Explain why a row that Redis returned for a recorded answer differs from the row in the history."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features import clock
from isthmus.features.clock import Status
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import IsthmusError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.served import EVENT, served_history
from isthmus.features.values.arrow import ARROW, from_arrow, to_arrow
from isthmus.features.values.columns import Ints, from_python
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.served import Cause, Group
from isthmus.orchestration.recording.storedrows import StoredRows, columns_of, from_history
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.serving.recorder.recorder import runtime

# Returns for each key the event time of the row that was readable online, or None without a row. Returns an error if
# the log of materializations does not show it.
Served = Callable[[], Sequence[int | None] | IsthmusError]


class Causes:
    """Explains why rows that Redis returned for recorded answers differ from the offline history today."""

    def __init__(self, project: Project) -> None:
        self._offline, self._table = project.offline_store(), RecordedAnswers.of(project)
        self._runtime = runtime()

    def runtime(self, group: Group, place: int) -> str:
        then = group.answers["runtime"][place].as_py()
        return f"by {then} then, by {self._runtime} now" if then != self._runtime else f"by {then}, as now"

    def explain(self, group: Group, name: str) -> Iterator[tuple[int, Cause, str]]:
        """Explain why rows that Redis returned for recorded answers differ from the rows in the offline history today.

        Yields for each differing row its index in the arrays of `group`, the cause, and a sentence for the user.
        `group` holds the answers with both sides: the rows that Redis returned, and today's rows. `name` is the view to
        compare.
        """
        rows = np.flatnonzero(~group.now[name].same(group.then[name]))
        if not len(rows):
            return
        view, history = group.contract.views[name], group.histories[name]
        keys = {key.name: [group.requests.keys[key.name][row] for row in rows.tolist()] for key in view.keys}
        contents = _contents(view, history, keys)
        served = cache(lambda: _served(self._offline, view, keys, group.at[rows]))
        later = self._later_ends(group)
        sides = (_rows(stored[name].take(rows)) for stored in (group.then, group.now))
        for n, (row, was, now) in enumerate(zip(rows.tolist(), *sides, strict=True)):
            key = tuple(values[n] for values in keys.values())
            at, end = int(group.at[row]), later.get(int(group.answer[row]))
            cause, why = _cause(at, end, was, now, contents.get(key, {}), served, n)
            yield row, cause, f"view {name}, key {_shown(key)}: {why}"

    def _later_ends(self, group: Group) -> dict[int, int]:
        """Find the answers after which the server's clock went back.

        Maps the index of each of these answers to the earliest time, in microseconds, at which a later answer ended.
        """
        part = group.answers
        # Reads only the answers between these, not a month of them: enough if the clock was steady.
        between = (ds.field("sequence") >= pc.min(part["sequence"])) & (ds.field("at") <= pc.max(part["at"]))
        columns = ["run", "sequence", "at", "seconds"]
        whole = self._table.read(ds.field("run").isin(pc.unique(part["run"])) & between, columns)
        at = whole["at"].cast(pa.int64()).to_numpy()
        # Answers are numbered when they end, texts when they begin, so a slow answer may have an earlier moment even by
        # a steady clock. Hence the comparison of moments with ends.
        ends = at + np.ceil(whole["seconds"].to_numpy().astype(np.float64) * 1e6).astype(np.int64)
        runs = whole["run"].combine_chunks().dictionary_encode()
        earliest: dict[tuple[str, int], int] = {}
        for own in np.split(np.arange(len(at)), np.flatnonzero(np.diff(runs.indices.to_numpy())) + 1):
            later = np.minimum.accumulate(ends[own][::-1])[::-1][1:]
            for place in np.flatnonzero(at[own][:-1] > later).tolist():
                row = int(own[place])
                earliest[runs[row].as_py(), whole["sequence"][row].as_py()] = int(later[place])
        pairs = zip(part["run"].to_pylist(), part["sequence"].to_pylist(), strict=True)
        return {place: earliest[pair] for place, pair in enumerate(pairs) if pair in earliest}


class _Row(NamedTuple):
    event: int
    known: int
    content: int
    status: int


def _rows(stored: StoredRows) -> list[_Row]:
    columns = (stored.event, stored.known, stored.content, stored.status)
    return [_Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _cause(  # noqa: PLR0913 - both sides of a row, and its context
    at: int, later: int | None, was: _Row, now: _Row, contents: Mapping[tuple[int, int], set[int]], served: Served,
    place: int,
) -> tuple[Cause, str]:  # fmt: skip
    if was.status == Status.DAMAGED:
        return Cause.STORE, "the row in Redis was damaged"
    if was.status == Status.NOT_FOUND and max(was.event, was.known) > at:
        since = _at(max(was.event, was.known))
        return Cause.CLOCK, (
            f"the answer was given at {_at(at)}, but Redis had a row known since {since}: the server's clock was "
            "behind the clock of the process that wrote the row"
        )
    if later is not None and now.status != Status.NOT_FOUND and max(now.known, now.event) > later:
        return Cause.CLOCK, (
            f"the answer was given at {_at(at)}, and a later one from the same server at {_at(later)}: its clock "
            f"went back, and the row known since {_at(now.known)} did not exist yet"
        )
    if was.status == Status.NOT_FOUND:
        online = served()
        if not isinstance(online, IsthmusError) and online[place] is not None:
            return (
                Cause.STORE,
                f"Redis had no row, although the row of {_at(now.event)} had been written: Redis lost it",
            )
        return (
            Cause.LATE,
            f"Redis had no row; the row of {_at(now.event)}, known since {_at(now.known)}, came later",
        )
    known = contents.get((was.event, was.known))
    if known is not None and (was.status == Status.EXPIRED or was.content in known):
        return Cause.LATE, (
            f"Redis had the row of {_at(was.event)}; the history has the row of {_at(now.event)}, known since "
            f"{_at(now.known)}, which reached Redis later"
        )
    if known is not None:
        return (
            Cause.ENGINE,
            f"the row of {_at(was.event)} has different values in the history now: it was recomputed",
        )
    if isinstance(online := served(), IsthmusError):
        return Cause.HISTORY, f"the row of {_at(was.event)} is not in the history, and {online}"
    if online[place] == was.event:
        return Cause.HISTORY, f"the row of {_at(was.event)} was removed from the history"
    return Cause.PUSH, (
        f"the row of {_at(was.event)}, known since {_at(was.known)}, is not in the history: it was written "
        "only to Redis, or waits for `isthmus pushes collect`"
    )


def _contents(
    view: ViewContract, history: ViewHistory, keys: Mapping[str, Sequence[Any]]
) -> dict[tuple[Any, ...], dict[tuple[int, int], set[int]]]:
    names = [column.name for column in view.keys]
    condition = ds.scalar(True)
    for column in view.keys:
        values = to_arrow(from_python(keys[column.name], column.dtype), column.dtype)
        condition &= ds.field(column.name).isin(pc.unique(values.cast(ARROW[column.dtype.name])))
    table = columns_of(history, [*names, "event_timestamp", "known_at", "content_hash"], condition)
    columns = [from_arrow(table[column.name], column.dtype).tolist(column.dtype) for column in view.keys]
    times = [table[name].cast(pa.int64()).to_pylist() for name in ("event_timestamp", "known_at")]
    contents: dict[tuple[Any, ...], dict[tuple[int, int], set[int]]] = {}
    for *key, event, known, content in zip(*columns, *times, table["content_hash"].to_pylist(), strict=True):
        contents.setdefault(tuple(key), {}).setdefault((event, known), set()).add(content)
    return contents


def _served(
    offline: OfflineStore, view: ViewContract, keys: Mapping[str, Sequence[Any]], at: Ints
) -> list[int | None] | IsthmusError:
    try:
        rows = from_history(served_history(offline, view), view, keys, at, times=(EVENT, EVENT))
    except IsthmusError as error:
        return error
    missing = rows.status == Status.NOT_FOUND
    return [None if gone else event for event, gone in zip(rows.event.tolist(), missing.tolist(), strict=True)]


def _at(moment: int) -> str:
    try:
        return clock.moment(moment).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError):
        return f"{moment} us"


def _shown(key: tuple[Any, ...]) -> str:
    return ", ".join(map(str, key)) if len(str(key)) < 100 else f"{key!s:.100}…"
