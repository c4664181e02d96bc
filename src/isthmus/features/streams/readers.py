"""Readers of streams. They return the events from given offsets on, and know which partitions they have read."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from isthmus.features.definition.streams import FileStream, Kafka, RedisStream, Stream
from isthmus.features.errors import DataError, DependencyError, extra
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.streams.formats import StreamEvent
from isthmus.features.streams.registry import expand

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

_SEQUENCE = 1 << 20
"""Entries that a Redis stream may have per millisecond."""
_PART = 2000
"""Messages to take from the Kafka client at a time."""
_REFRESH_SECONDS = 30.0
"""Seconds between two looks for new partitions."""
_SILENCE_SECONDS = 10.0
"""Seconds to wait for the broker's list of partitions."""
_SKIP = "add the missing events to the source's data, then run `isthmus stream --skip-expired`"


class StreamReader(Protocol):
    """Reads the events of a stream in the order of each partition's offsets, from the offsets given to `seek`.

    Attributes:
        passed: number of Redis stream entries before the next offset, whether read or removed. Set it before
            `seek`. None if unknown, and for other streams, whose offsets have no gaps.
    """

    passed: int | None

    def partitions(self) -> list[str]:
        """Return the names of the partitions that are read, also of those without events."""

    def seek(self, offsets: Mapping[str, int], *, skip_expired: bool = False) -> None:
        """Continue with these offsets. A partition that is missing is read from its first event.

        Raises DataError if the stream does not exist. Unless `skip_expired`, also raises DataError if events after an
        offset have expired or were trimmed, or if the topic or Redis stream was created again. Raises DependencyError
        if the broker does not answer.
        """

    def poll(self, limit: int, seconds: float) -> list[StreamEvent]:
        """Return up to `limit` events that arrive within `seconds`.

        Raises DataError if events expire or are trimmed before they are read. Raises DependencyError if the broker does
        not answer.
        """

    def ended(self) -> set[str]:
        """Return the partitions whose events were all returned by `poll`."""

    def lag(self) -> dict[str, int]:
        """Return the number of events of each partition that `poll` has not returned yet; at most 1,000 for Redis."""

    def close(self) -> None: ...


def open_reader(source: str, stream: Stream, root: Path, redis_url: str) -> StreamReader:
    """Return a reader of a stream. `redis_url` is the project's online store; relative folders start from `root`.

    Raises ConfigurationError if an environment variable is missing, DependencyError if a library is missing, and
    DataError if a folder does not exist. Brokers are contacted later.
    """
    where = f"source {source}, stream"
    match stream:
        case Kafka():
            return KafkaReader(where, stream)
        case RedisStream(connection=""):
            return RedisReader(where, stream, redis_url)
        case RedisStream():
            return RedisReader(where, stream, expand(where, f"${{{stream.connection}}}"))
        case FileStream():
            return FileReader(where, root / stream.folder)


class KafkaReader:
    """Reads a topic with librdkafka. Offsets are kept with the events and not in a consumer group."""

    passed: int | None = None

    def __init__(self, where: str, stream: Kafka) -> None:
        with extra("streams"):
            import confluent_kafka
        self._kafka, self._where, self._topic = confluent_kafka, f"{where} {stream.topic}", stream.topic
        self._servers, self._problem = stream.servers, ""
        options = {name: expand(where, value) for name, value in stream.properties.items()}
        self._consumer: Consumer = confluent_kafka.Consumer({
            "bootstrap.servers": stream.servers, "group.id": "isthmus", "enable.auto.commit": False,
            "auto.offset.reset": "error", "enable.partition.eof": True, "fetch.wait.max.ms": 50,
            "allow.auto.create.topics": False, "log_level": 0, "error_cb": self._failed, **options,
        })  # fmt: skip
        self._ended: set[str] = set()
        self._next: dict[str, int] = {}
        self._looked = 0.0

    def partitions(self) -> list[str]:
        return list(self._next)

    def _existing(self, read: Iterable[str]) -> list[str]:
        with self._answering():
            metadata = self._consumer.list_topics(self._topic, timeout=_SILENCE_SECONDS)
        topic = metadata.topics.get(self._topic)
        if topic is None or topic.error is not None or not topic.partitions:
            raise DataError(self._where, f"the topic does not exist at {self._servers}",
                            remedy="create it, or correct topic=; the events read so far are kept")  # fmt: skip
        self._looked = time.monotonic()
        names = [str(number) for number in sorted(topic.partitions)]
        if gone := sorted(set(read) - set(names), key=int):
            raise DataError(
                self._where, f"partitions {', '.join(gone)} no longer exist: the topic was created again",
                remedy="give the new topic another name; rows of the events read so far are kept",
            )  # fmt: skip
        return names

    def seek(self, offsets: Mapping[str, int], *, skip_expired: bool = False) -> None:
        self._ended, self._next = set(), {}
        for name in self._existing(offsets):
            low, _ = self._bounds(name)
            start = offsets.get(name, low)
            self._next[name] = max(start, low) if skip_expired else start
            if start < low and not skip_expired:
                raise self._expired(name, start, low)
        self._assign()

    def _expired(self, name: str, start: int, low: int) -> DataError:
        return DataError(
            self._where, f"partition {name}: events {start} to {low - 1} have expired",
            remedy="raise the topic's retention; " + _SKIP,
        )  # fmt: skip

    def _assign(self) -> None:
        place = self._kafka.TopicPartition
        self._consumer.assign([place(self._topic, int(name), at) for name, at in self._next.items()])

    def _bounds(self, name: str, *, cached: bool = False) -> tuple[int, int]:
        place = self._kafka.TopicPartition(self._topic, int(name))
        with self._answering():
            bounds: tuple[int, int] = self._consumer.get_watermark_offsets(place, _SILENCE_SECONDS, cached)
            return bounds

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except self._kafka.KafkaException as error:
            raise self._silent(error.args[0].str()) from error

    def _silent(self, problem: str) -> DependencyError:
        remedy = "start the broker, or correct servers=; no event is lost, it is read again from its offset"
        return DependencyError(self._where, f"{self._servers} does not answer ({problem})", remedy=remedy)

    def poll(self, limit: int, seconds: float) -> list[StreamEvent]:
        if time.monotonic() - self._looked > _REFRESH_SECONDS:
            new = [name for name in self._existing(self._next) if name not in self._next]
            if new:
                self._next |= dict.fromkeys(new, 0)
                self._assign()
        events, kinds = list[StreamEvent](), self._kafka.KafkaError
        names = {int(name): name for name in self._next}
        for message in self._consume(limit, seconds):
            name, error = names[message.partition() or 0], message.error()
            if error is None:
                if self._ended:
                    self._ended.discard(name)
                events.append(StreamEvent(name, message.offset() or 0, message.value()))
            elif error.code() == kinds._PARTITION_EOF:
                self._ended.add(name)
            elif error.code() in (kinds._AUTO_OFFSET_RESET, kinds.OFFSET_OUT_OF_RANGE):
                start, (low, high) = self._next[name], self._bounds(name)
                raise self._expired(name, start, low) if start < low else self._created_again(name, high)
            elif not error.retriable():
                raise DependencyError(self._where, f"{self._servers} answers: {error.str()}")
        if events:
            self._problem = ""
            self._next |= {event.partition: event.offset + 1 for event in events}
        elif self._problem:
            problem, self._problem = self._problem, ""
            raise self._silent(problem)
        else:
            for name, start in self._next.items():
                high = self._bounds(name, cached=True)[1]
                if 0 <= high < start:  # not every broker answers with an error
                    raise self._created_again(name, high)
        return events

    def _consume(self, limit: int, seconds: float) -> "Iterator[Message]":
        # In parts: the Kafka client blocks Python's other threads while it creates the messages of a part.
        end = time.monotonic() + seconds
        while limit > 0:
            wanted = min(limit, _PART)
            part = self._consumer.consume(wanted, max(0.0, end - time.monotonic()))
            yield from part
            limit = limit - wanted if len(part) == wanted else 0

    def _created_again(self, name: str, high: int) -> DataError:
        problem = f"partition {name} ends at {high}, but {self._next[name]} events were read: it was created again"
        return DataError(self._where, problem, remedy="give the new topic another name")

    def _failed(self, error: Any) -> None:
        if error.code() == self._kafka.KafkaError._ALL_BROKERS_DOWN or error.fatal():
            self._problem = error.str()

    def ended(self) -> set[str]:
        return set(self._ended)

    def lag(self) -> dict[str, int]:
        return {name: max(0, self._bounds(name, cached=True)[1] - at) for name, at in self._next.items()}

    def close(self) -> None:
        self._consumer.close()


class RedisReader:
    """Reads a Redis stream. It has one partition, and the offset of an entry is computed from its id."""

    passed: int | None = None

    def __init__(self, where: str, stream: RedisStream, url: str) -> None:
        self._where, self._stream, self._url = f"{where} {stream.key}", stream, url
        self._client = connect(url)
        self._next, self._at_end = 0, False

    def partitions(self) -> list[str]:
        return ["0"]

    def seek(self, offsets: Mapping[str, int], *, skip_expired: bool = False) -> None:
        self._next, self._at_end, self.passed = offsets.get("0", 0), False, None if skip_expired else self.passed
        info, _ = self._look(1)
        if not skip_expired and self._next > _offset(info["last-generated-id"]) + 1:
            raise self._lost()
        self._require_untrimmed(info)

    def _look(self, limit: int) -> tuple[Mapping[str, Any], list[tuple[bytes, Mapping[bytes, bytes]]]]:
        """Return the state of the stream and its next entries, of the same moment."""
        with translate_errors(self._url), self._client.pipeline(transaction=True) as pipeline:
            pipeline.xinfo_stream(self._stream.key)
            pipeline.xrange(self._stream.key, _entry_id(self._next), "+", count=limit)
            info, entries = pipeline.execute(raise_on_error=False)
            if isinstance(entries, Exception):
                raise entries
        if isinstance(info, Exception):  # the stream does not exist
            return {"last-generated-id": b"0-0"}, []
        if isinstance(info, list):  # the pipeline of a cluster does not parse replies
            info = {name.decode(): value for name, value in _pairs(info).items()}
            entries = [(name, _pairs(fields)) for name, fields in entries]
        return info, entries

    def _require_untrimmed(self, info: Mapping[str, Any]) -> None:
        """Raise DataError if entries were trimmed before they were read. Redis 6 does not count them.

        Redis trims the oldest entries first. So if any read entry is left, no unread entry was trimmed. If none is
        left, all remaining entries are unread, and `passed` must be the number of entries that are gone.
        """
        if "entries-added" not in info:
            return
        first, unread = info["first-entry"], None
        if _offset(info["last-generated-id"]) < self._next:
            unread = 0
        elif not first or _offset(first[0]) >= self._next:
            unread = info["length"]
        if _offset(info["max-deleted-entry-id"]) >= max(1, self._next):
            self.passed = None  # XDEL has removed single entries, which is not an error
        if unread is None:
            return
        passed = info["entries-added"] - unread
        self.passed = passed if self.passed is None else self.passed
        if passed < self.passed:
            raise self._lost()
        if passed > self.passed:
            raise DataError(
                self._where, f"{passed - self.passed:,} entries after {_entry_id(self._next - 1)} were trimmed unread",
                remedy="raise MAXLEN; " + _SKIP,
            )  # fmt: skip

    def _lost(self) -> DataError:
        problem = "Redis lost entries that were read: the stream was created again, or Redis has older data"
        return DataError(self._where, problem, remedy="give a new stream another key; " + _SKIP)

    def poll(self, limit: int, seconds: float) -> list[StreamEvent]:
        info, entries = self._look(limit)
        if not entries:
            with translate_errors(self._url):
                last = _entry_id(self._next - 1)
                self._client.xread({self._stream.key: last}, count=1, block=max(1, int(seconds * 1000)))
            info, entries = self._look(limit)
        self._require_untrimmed(info)
        self._at_end = len(entries) < limit
        events = [StreamEvent("0", _offset(name), fields.get(self._stream.member.encode())) for name, fields in entries]
        if events:
            self._next = events[-1].offset + 1
            self.passed = None if self.passed is None else self.passed + len(events)
        return events

    def ended(self) -> set[str]:
        return {"0"} if self._at_end else set()

    def lag(self) -> dict[str, int]:
        with translate_errors(self._url):
            waiting: Any = self._client.xrange(self._stream.key, _entry_id(self._next), "+", count=1000)
        return {"0": len(waiting)}

    def close(self) -> None:
        self._client.close()


def _pairs(reply: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(reply[::2], reply[1::2], strict=True))


def _entry_id(offset: int) -> str:
    return "0-0" if offset < 0 else f"{offset // _SEQUENCE}-{offset % _SEQUENCE}"


def _offset(name: bytes) -> int:
    moment, number = map(int, name.split(b"-"))
    if number >= _SEQUENCE:
        raise DataError(f"Redis stream, entry {name.decode()}", f"more than {_SEQUENCE:,} entries in a millisecond",
                        remedy="let Redis choose the ids of entries")  # fmt: skip
    return moment * _SEQUENCE + number


class FileReader:
    """Reads the lines of files in the order of their names. A file is a partition, and a line number an offset."""

    passed: int | None = None

    def __init__(self, where: str, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(f"{where} {folder}", "is not a folder", remedy="create it, or correct folder=")
        self._folder = folder
        self._read: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self._current: Iterator[StreamEvent] = iter(())
        self._at_end = False

    def partitions(self) -> list[str]:
        return sorted(file.name for file in self._folder.iterdir() if file.is_file() and file.name[0] != ".")

    def seek(self, offsets: Mapping[str, int], *, skip_expired: bool = False) -> None:  # noqa: ARG002
        self._read, self._at_end = dict(offsets), False
        self._current = iter(())

    def poll(self, limit: int, seconds: float) -> list[StreamEvent]:
        end = time.monotonic() + seconds
        events: list[StreamEvent] = []
        while len(events) < limit:
            event = next(self._current, None)
            if event is not None:
                events.append(event)
                continue
            left = next((name for name in self.partitions() if self._read.get(name, 0) < self._length(name)), None)
            self._at_end = left is None
            if left is not None:
                # Counted as read to its end: a file that is removed meanwhile must not be looked for again.
                self._current, self._read[left] = self._lines(left, self._read.get(left, 0)), self._length(left)
            elif events or time.monotonic() >= end:
                break
            else:
                time.sleep(min(0.05, max(0.0, end - time.monotonic())))
        return events

    def _length(self, name: str) -> int:
        if name not in self._lengths:
            try:
                with (self._folder / name).open("rb") as file:
                    self._lengths[name] = sum(1 for line in file if line.strip())
            except FileNotFoundError:  # removed since it was listed
                return 0
        return self._lengths[name]

    def _lines(self, name: str, start: int) -> Iterator[StreamEvent]:
        with suppress(FileNotFoundError), (self._folder / name).open("rb") as file:
            for number, line in enumerate(line for line in file if line.strip()):
                if number >= start:
                    yield StreamEvent(name, number, line.strip())

    def ended(self) -> set[str]:
        return {*self.partitions()} if self._at_end else set()

    def lag(self) -> dict[str, int]:
        """Return the lines of the files that `poll` has not begun to read."""
        return {name: left for name in self.partitions() if (left := self._length(name) - self._read.get(name, 0)) > 0}

    def close(self) -> None:
        self._current = iter(())
