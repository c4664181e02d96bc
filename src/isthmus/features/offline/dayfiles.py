"""The rows of a build, day by day (`BuiltRows`), and the Parquet files that several processes write of them."""

import json
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.transaction import AddAction

from isthmus.features.clock import moment
from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import DAY, Days, day_name
from isthmus.features.offline.canonical import (
    Duplicates,
    ahead_of,
    by_day,
    canonical,
    canonical_pushes,
    declared_schema,
    merge,
)
from isthmus.features.offline.commits import Day
from isthmus.features.offline.delta import open_output, storage_files
from isthmus.features.offline.partitions import DAY_COLUMN
from isthmus.features.offline.pushes import PushLog
from isthmus.features.offline.spool import DaySpool
from isthmus.features.values.arrow import micros

if TYPE_CHECKING:
    import pyarrow.fs as fs


@dataclass
class BuiltRows:
    """Computed rows of a view in the form of its table: canonical, and merged with the rows that were pushed.

    `pushes` is the view's log of pushed rows at `version`, by default the newest. `now` is the time of the build in
    microseconds since 1970 UTC. The counters cover the days that were yielded; see `Prepared` for their meaning.
    """

    view: ViewContract
    pushes: PushLog
    now: int
    version: int | None = None
    duplicates: Duplicates = field(init=False)
    ahead: int = 0
    pushed: int = 0
    replaced: int = 0

    def __post_init__(self) -> None:
        self.duplicates = Duplicates(self.view)

    def days(
        self, rows: DaySpool, pushed: Sequence[int], within: Days | None = None
    ) -> Iterator[tuple[int, Day, pa.Table]]:
        """Yield each day with its summary and its rows. `pushed` has the days of pushed rows to merge, ascending."""
        for part, known in _with_pushed(rows, pushed, within):
            computed = canonical(self.view, declared_schema(self.view).empty_table() if part is None else part)
            self.duplicates.add(computed)
            own = computed.slice(0, 0)
            if known:
                own = canonical_pushes(self.view, self.pushes.rows(self.view, known, self.version))
            group, outdone = merge(self.view, computed, own)
            self.pushed += len(group) - len(computed) + outdone
            self.replaced += len(own) - len(group) + len(computed) - outdone
            self.ahead += ahead_of(group, self.now)
            for day, (entry, day_rows) in by_day(self.view, group).items():
                yield day, entry, day_rows


def _with_pushed(
    rows: DaySpool, pushed: Sequence[int], within: Days | None
) -> Iterator[tuple[pa.Table | None, list[int]]]:
    """Yield each group of rows with the pushed days up to its end, and at last None with the later pushed days."""
    left = deque(day for day in pushed if within is None or day in within)
    for group in rows.groups(within):
        last = int(micros(group["event_timestamp"])[-1] // DAY)
        yield group, [left.popleft() for _ in range(sum(day <= last for day in left))]
    if left:
        yield None, list(left)


@dataclass(frozen=True)
class DayFile:
    """A day of a view's table after a build. `path` is its new file, relative to the table; empty if it is unchanged.

    `stats` are the file's statistics in Delta's JSON.
    """

    day: int
    rows: int
    digest: str
    path: str = ""
    size: int = 0
    stats: str = ""

    @property
    def entry(self) -> Day:
        return Day(self.rows, bytes.fromhex(self.digest))

    def action(self) -> AddAction:
        now = int(time.time() * 1000)
        return AddAction(self.path, self.size, {DAY_COLUMN.name: day_name(self.day)}, now, True, self.stats)


@dataclass(frozen=True)
class DayFiles:
    """The days of a view that a build computed, in files that no commit has yet; for `OfflineStore.prepare`.

    `ahead` and `pushes` are as in `Prepared`.
    """

    days: Mapping[int, DayFile]
    ahead: int = 0
    pushes: tuple[int, int] = (0, 0)

    def part(self, within: Days) -> "DayFiles":
        """Select the days in a range. The counters stay with the first day."""
        inside = {day: file for day, file in self.days.items() if day in within}
        first = min(self.days, default=within.first) in within
        return DayFiles(inside, self.ahead if first else 0, self.pushes if first else (0, 0))


@dataclass(frozen=True)
class DayTarget:
    """A table of the offline store, for processes that write its day files without committing them.

    An engine can send it to executors. Credentials are not part of it: each process takes them from its environment.

    Attributes:
        root: folder or URL of the offline store.
        options: storage options, for a URL.
        contract: contract of the view.
        old: row count and digest of each stored day whose file can stay.
        pushed: days in the log of pushed rows, ascending; `version` is the version of that log.
        now: time of the build in microseconds since 1970 UTC.
        probe: name of a file in `root` that exists during the build, or empty.
    """

    root: str
    options: Mapping[str, str]
    contract: ViewContract
    old: Mapping[int, Day]
    pushed: Sequence[int]
    version: int | None
    now: int
    probe: str = ""

    def files(self) -> "fs.FileSystem":
        return storage_files(f"{self.root}/{self.contract.table}", self.options)

    @contextmanager
    def probed(self) -> "Iterator[DayTarget]":
        """Write a probe file for the block. A process that sees another store under this root lacks it."""
        probe, storage = f"_probe-{secrets.token_hex(8)}", storage_files(self.root, self.options)
        if "://" not in self.root:
            Path(self.root).mkdir(parents=True, exist_ok=True)
        with open_output(storage, probe) as file:
            file.write(b"isthmus")
        try:
            yield replace(self, probe=probe)
        finally:
            with suppress(OSError):
                storage.delete_file(probe)

    def require_access(self) -> None:
        """Raise OSError if this process does not see the store of the process that made the probe."""
        with storage_files(self.root, self.options).open_input_file(self.probe) as file:
            file.read()

    def write(self, rows: DaySpool, *, pushed: Iterable[int] | None = None) -> tuple[BuiltRows, list[DayFile]]:
        """Write a file for each day that differs from the table; return all days, and the counters.

        `rows` must have all computed rows of its days. `pushed` has days whose pushed rows are merged: by default
        the days of `rows`.
        """
        view = self.contract
        built = BuiltRows(view, PushLog(self.root, view.table, self.options), self.now, self.version)
        own = set(rows.days() if pushed is None else pushed)
        files, storage = [], self.files()
        for day, entry, day_rows in built.days(rows, [day for day in self.pushed if day in own]):
            file = DayFile(day, entry.rows, entry.digest.hex())
            if self.old.get(day) != entry:
                path = f"{DAY_COLUMN.name}={day_name(day)}/part-{secrets.token_hex(16)}.parquet"
                size = _write(storage, path, day_rows, local="://" not in self.root)
                file = DayFile(day, entry.rows, entry.digest.hex(), path, size, _statistics(day_rows))
            files.append(file)
        return built, files


def _write(storage: "fs.FileSystem", path: str, rows: pa.Table, *, local: bool) -> int:
    import pyarrow.parquet as pq

    if local:
        storage.create_dir(str(Path(path).parent), recursive=True)
    with open_output(storage, path) as sink:
        # The file of a day is small: dictionaries would make it larger and slower to read.
        with pq.ParquetWriter(sink, rows.schema, use_dictionary=False) as file:
            file.write_table(rows)
        size: int = sink.tell()
    return size


def _statistics(rows: pa.Table) -> str:
    flat = [column.name for column in rows.schema if not pa.types.is_nested(column.type)]
    times = pc.min_max(rows["event_timestamp"])
    low, high = ({"event_timestamp": _text(times[side].value)} for side in ("min", "max"))
    nulls = {name: rows[name].null_count for name in flat}
    return json.dumps({"numRecords": len(rows), "minValues": low, "maxValues": high, "nullCount": nulls})


def _text(at: int) -> str:
    return moment(at).isoformat(timespec="microseconds").replace("+00:00", "Z")
