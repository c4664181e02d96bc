"""Read and decode the next events while earlier ones are processed."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import pyarrow as pa

from isthmus.features.streams.formats import StreamEvent, Unreadable
from isthmus.features.streams.readers import StreamReader

BACKLOG = 0.25
"""The next batch is read ahead if this one is at least so full."""

Decoded = tuple[pa.Table, list[StreamEvent], list[Unreadable]]
"""The rows of the readable events, these events in the same order, and the unreadable events."""


@dataclass(frozen=True)
class EventBatch:
    """Events and the state of their stream after them.

    Attributes:
        count: number of events, with the unreadable ones.
        partitions: names of all partitions of the stream.
        ended: partitions that were read to their end when this batch was read.
        passed: entries that have passed, as the reader counts them.
        at: time of reading, of `time.monotonic`.
    """

    count: int
    decoded: Decoded
    partitions: list[str]
    ended: set[str] = field(default_factory=set)
    passed: int | None = None
    at: float = field(default_factory=time.monotonic)

    @property
    def drained(self) -> bool:
        return not self.count and self.ended >= set(self.partitions)


class ReadAhead:
    """Reads a stream in a thread. Starts with the first batch at once, and reads ahead while there is a backlog.

    Call `seek` on the reader first. Nothing else may use the reader.
    """

    def __init__(
        self, reader: StreamReader, decode: Callable[[list[StreamEvent]], Decoded], limit: int, seconds: float
    ) -> None:
        self._reader, self._decode, self._limit, self._seconds = reader, decode, limit, seconds
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="isthmus-stream")
        self._next: Future[EventBatch] | None = self._pool.submit(self._read)

    def _read(self) -> EventBatch:
        events = self._reader.poll(self._limit, self._seconds)
        decoded, reader = self._decode(events), self._reader
        return EventBatch(len(events), decoded, reader.partitions(), reader.ended(), reader.passed)

    def batch(self) -> EventBatch:
        """Return the next events, up to the limit, that arrive within some seconds.

        Raises the errors of the reader and of the decoder. The stream must then be opened again.
        """
        waiting, self._next = self._next, None
        batch = self._read() if waiting is None else waiting.result()
        if waiting is not None and batch.drained:
            # It was read a while ago.
            batch = self._read()
        if batch.count >= self._limit * BACKLOG:
            self._next = self._pool.submit(self._read)
        return batch

    def lag(self) -> dict[str, int]:
        """Return the number of events of each partition that `batch` has not returned."""
        if self._next is not None:
            wait([self._next])
        lag = self._reader.lag()
        if self._next is None or self._next.exception() is not None:
            return lag
        _, readable, unreadable = self._next.result().decoded
        for event in (*readable, *(each.event for each in unreadable)):
            lag[event.partition] = lag.get(event.partition, 0) + 1
        return lag

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._next = None
