"""Explain why a stored row behind a recorded answer differs from the history's row for that moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

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
from isthmus.orchestration.recording.storedrows import StoredRows, from_history
from isthmus.orchestration.recording.table import RecordedAnswers, by_view
from isthmus.serving.recorder.recorder import runtime


class Cause(StrEnum):
    """Why an answer differs or cannot be recomputed."""

    LATE = "a late row"
    PUSH = "a push not in the history"
    PACKAGE = "another package"
    CLOCK = "a clock"
    ENGINE = "an engine"
    STORE = "the online store"
    HISTORY = "the history"
    CONTRACT = "the contract"
    KEY = "a key"


@dataclass(frozen=True)
class Recorded:
    """A group of answers as arrays over their rows.

    Attributes:
        part: the answers as a table.
        rows: number of rows per answer, 0 if its request cannot be read, shape (n,).
        answer: index of each row's answer.
        starts: index of each answer's first row.
        at: moment of each row in microseconds since 1970 UTC.
        views: stored rows by view.
        outputs: recorded outputs of all rows, float32.
        digest: recorded digests of all rows; may be empty.
    """

    part: pa.Table
    rows: Ints
    answer: Ints
    starts: Ints
    at: Ints
    views: Mapping[str, StoredRows]
    outputs: np.ndarray[Any, Any]
    digest: Ints

    @property
    def package(self) -> str:
        package: str = self.part["package"][0].as_py()
        return package

    @classmethod
    def of(cls, part: pa.Table, rows: Ints) -> "Recorded":
        """Build the arrays; an answer whose number of rows differs from `rows` counts as unreadable."""
        part = part.combine_chunks()
        read = rows == part["rows"].to_numpy()
        whole = part.filter(pa.array(read)).combine_chunks()
        own = whole["rows"].to_numpy().astype(np.int64)
        rows = np.where(read, rows, 0)
        answer = np.repeat(np.arange(len(part)), rows)
        at = part["at"].cast(pa.int64()).to_numpy()[answer]
        names = part["views"][0].as_py()
        columns = {
            name: by_view(_flat(whole, name), own, len(names)) for name in ("event", "known", "content", "status")
        }
        views = {
            view: StoredRows(**{name: own[n].astype(np.int64) for name, own in columns.items()}, columns={})
            for n, view in enumerate(names)
        }
        starts = np.cumsum(rows) - rows
        return cls(part, rows, answer, starts, at, views, _flat(whole, "outputs"), _flat(whole, "digest"))


def _flat(part: pa.Table, name: str) -> np.ndarray[Any, Any]:
    flat: np.ndarray[Any, Any] = pc.list_flatten(part[name]).combine_chunks().to_numpy(zero_copy_only=False)
    return flat


class Causes:
    """Finds the causes of differing rows from the history, its earlier versions and the order of answers."""

    def __init__(self, project: Project, offline: OfflineStore) -> None:
        self._project, self._offline = project, offline
        self._runtime = runtime()

    def runtime(self, recorded: Recorded, place: int) -> str:
        """Describe the runtime that computed an answer and the current one."""
        return self.runtimes(recorded.part["runtime"][place].as_py())

    def runtimes(self, then: str) -> str:
        """Describe the recorded runtime and the current one."""
        return f"by {then} then, by {self._runtime} now" if then != self._runtime else f"by {then}, as now"

    def of(  # noqa: PLR0913 - both sides of a row, and its context
        self, view: ViewContract, history: ViewHistory, keys: Mapping[str, Sequence[Any]], recorded: Recorded,
        rows: Ints, now: StoredRows, then: StoredRows,
    ) -> list[tuple[Cause, str]]:  # fmt: skip
        """Return cause and explanation of each differing row; `rows` has their indices, `keys` their keys."""
        at = recorded.at[rows]
        stored = _Contents(view, history, keys)
        served = _Served(self._offline, view, keys, at)
        ahead = self._ahead(recorded)
        causes = []
        for n, row in enumerate(rows.tolist()):
            key = tuple(keys[column.name][n] for column in view.keys)
            moment, answer = int(at[n]), int(recorded.answer[row])
            was = _Row(*(int(side[row]) for side in (then.event, then.known, then.content, then.status)))
            is_now = _Row(*(int(side[row]) for side in (now.event, now.known, now.content, now.status)))
            cause, why = self._cause(moment, ahead.get(answer), was, is_now, stored.of(key), served, n)
            causes.append((cause, f"view {view.name}, key {_shown(key)}: {why}"))
        return causes

    def _cause(  # noqa: PLR0913 - both sides of a row, and its context
        self, at: int, later: int | None, was: "_Row", now: "_Row", stored: "Mapping[tuple[int, int], set[int]]",
        served: "_Served", place: int,
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
            if served.event(place) is not None:
                return (
                    Cause.STORE,
                    f"Redis had no row, although the row of {_at(now.event)} had been written: Redis lost it",
                )
            return (
                Cause.LATE,
                f"Redis had no row; the row of {_at(now.event)}, known since {_at(now.known)}, came later",
            )
        known = stored.get((was.event, was.known))
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
        if served.problem:
            return Cause.HISTORY, f"the row of {_at(was.event)} is not in the history, and {served.problem}"
        if served.event(place) == was.event:
            return Cause.HISTORY, f"the row of {_at(was.event)} was removed from the history"
        return Cause.PUSH, (
            f"the row of {_at(was.event)}, known since {_at(was.known)}, is not in the history: it was written "
            "only to Redis, or waits for `isthmus pushes collect`"
        )

    def _ahead(self, recorded: Recorded) -> dict[int, int]:
        """Map answers to the earliest end of a later answer from the same server that finished before their moment.

        Such an answer shows that the server's clock went back.
        """
        part = recorded.part
        # Reads only the answers between these, not a month of them: enough if the clock was steady.
        between = (ds.field("sequence") >= pc.min(part["sequence"])) & (ds.field("at") <= pc.max(part["at"]))
        table = RecordedAnswers.of(self._project)
        columns = ["run", "sequence", "at", "seconds"]
        whole = table.read(ds.field("run").isin(pc.unique(part["run"])) & between, columns)
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
        pairs = zip(recorded.part["run"].to_pylist(), recorded.part["sequence"].to_pylist(), strict=True)
        return {place: earliest[pair] for place, pair in enumerate(pairs) if pair in earliest}


@dataclass(frozen=True, slots=True)
class _Row:
    event: int
    known: int
    content: int
    status: int


class _Contents:
    def __init__(self, view: ViewContract, history: ViewHistory, keys: Mapping[str, Sequence[Any]]) -> None:
        names = [column.name for column in view.keys]
        condition = ds.scalar(True)
        for column in view.keys:
            values = to_arrow(from_python(keys[column.name], column.dtype), column.dtype)
            condition &= ds.field(column.name).isin(pc.unique(values.cast(ARROW[column.dtype.name])))
        data = ds.dataset(history.data) if isinstance(history.data, pa.Table) else history.data
        table = data.to_table([*names, "event_timestamp", "known_at", "content_hash"], filter=condition)
        columns = [from_arrow(table[column.name], column.dtype).tolist(column.dtype) for column in view.keys]
        times = [table[name].cast(pa.int64()).to_pylist() for name in ("event_timestamp", "known_at")]
        self._rows: dict[tuple[Any, ...], dict[tuple[int, int], set[int]]] = {}
        for *key, event, known, content in zip(*columns, *times, table["content_hash"].to_pylist(), strict=True):
            self._rows.setdefault(tuple(key), {}).setdefault((event, known), set()).add(content)

    def of(self, key: tuple[Any, ...]) -> Mapping[tuple[int, int], set[int]]:
        """Map event and known times of a key's rows to their content hashes."""
        return self._rows.get(key, {})


class _Served:
    """The rows that were readable online for some keys at their moments."""

    def __init__(self, offline: OfflineStore, view: ViewContract, keys: Mapping[str, Sequence[Any]], at: Ints) -> None:
        self._query = offline, view, keys, at

    @property
    def problem(self) -> str:
        """Why these rows are unknown, or an empty text."""
        found = self._events
        return str(found) if isinstance(found, IsthmusError) else ""

    def event(self, place: int) -> int | None:
        """Return the event time of the readable row, or None if there was no row or it is unknown."""
        found = self._events
        return None if isinstance(found, IsthmusError) else found[place]

    @cached_property
    def _events(self) -> list[int | None] | IsthmusError:
        offline, view, keys, at = self._query
        try:
            history = served_history(offline, view)
            rows = from_history(history, view, keys, at, times=(EVENT, EVENT))
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
