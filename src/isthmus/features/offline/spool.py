"""Rows grouped by day: in memory up to a limit, then in files."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow as pa

from isthmus.features.days import DAY, Days
from isthmus.features.values.arrow import micros

LIMIT = 256 << 20
"""Bytes of rows that a spool holds in memory, and of a group of several days."""
GROUP = 1 << 18
"""Maximum rows of a group of several days; a single day may have more."""


class DaySpool(AbstractContextManager["DaySpool"]):
    """A buffer that accepts rows in any order and returns them by day. Beyond `limit` bytes, it uses temporary files.

    Use it in a `with` block: its end frees the rows and deletes the files.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.rows = 0
        self._waiting: list[pa.Table] = []
        self._bytes = 0
        self._runs: list[_Run] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __exit__(self, *_: object) -> None:
        self._waiting, self._runs = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def add(self, rows: pa.Table) -> None:
        self.rows += len(rows)
        # The size of a slice may include the shared buffers of its table, which is close enough for a limit.
        share = max(1, -(-rows.nbytes // self.limit))
        size = -(-len(rows) // share) or 1
        for start in range(0, len(rows), size):
            part = rows.slice(start, size)
            self._waiting.append(part)
            self._bytes += part.nbytes
            if self._bytes >= self.limit:
                self._sort()
                self._runs[-1].write(self._file())

    def days(self) -> list[int]:
        self._sort()
        return sorted({int(day) for run in self._runs for day in run.days})

    def groups(self, within: Days | None = None) -> Iterator[pa.Table]:
        parts: list[pa.Table] = []
        rows = held = 0
        for day in self.days():
            if within is not None and day not in within:
                continue
            day_parts = [part for run in self._runs if len(part := run.of(day))]
            size = sum(map(len, day_parts))
            day_bytes = sum(part.nbytes for part in day_parts)
            if parts and (rows + size > GROUP or held + day_bytes > self.limit):
                yield pa.concat_tables(parts)
                parts, rows, held = [], 0, 0
            parts += day_parts
            rows, held = rows + size, held + day_bytes
        if parts:
            yield pa.concat_tables(parts)

    def _sort(self) -> None:
        if self._waiting:
            self._runs.append(_Run(pa.concat_tables(self._waiting)))
            self._waiting, self._bytes = [], 0

    def _file(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="isthmus-")
        return Path(self._folder.name) / f"{len(self._runs)}.arrow"


class _Run:
    def __init__(self, rows: pa.Table) -> None:
        day = micros(rows["event_timestamp"]) // DAY
        if len(day) and (day[1:] < day[:-1]).any():
            order = np.argsort(day, kind="stable")
            rows, day = rows.take(pa.array(order)), day[order]
        self.rows = rows
        self.file: pa.ipc.RecordBatchFileReader | None = None
        self.days, starts = np.unique(day, return_index=True)
        ends = np.append(starts, len(day))[1:]
        self.places = dict(zip(self.days.tolist(), zip(starts.tolist(), ends.tolist(), strict=True), strict=True))

    def of(self, day: int) -> pa.Table:
        start, end = self.places.get(day, (0, 0))
        if self.file is None:
            return self.rows.slice(start, end - start)
        return pa.Table.from_batches([self.file.get_batch(n) for n in range(start, end)], self.rows.schema)

    def write(self, file: Path) -> None:
        """Move the rows to a file, in batches of a day. Unlike pages of a mapped file, these are freed after use."""
        places, written = {}, 0
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, self.rows.schema) as writer:
            for day in self.places:
                batches = self.of(day).combine_chunks().to_batches()
                places[day] = (written, written := written + len(batches))
                for batch in batches:
                    writer.write_batch(batch)
        self.rows, self.places = self.rows.schema.empty_table(), places
        self.file = pa.ipc.open_file(pa.OSFile(str(file)))
