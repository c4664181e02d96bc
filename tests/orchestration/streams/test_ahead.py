"""Reading a batch ahead of its processing: each event once and in order, whatever is read when."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from isthmus.features.errors import DataError
from isthmus.features.streams.formats import StreamEvent
from isthmus.features.streams.readers import FileReader
from isthmus.orchestration.streams.ahead import Decoded, ReadAhead

LIMIT = 8


def decode(events: list[StreamEvent]) -> Decoded:
    if any(event.value == b"fails" for event in events):
        raise DataError("the registry", "does not answer")
    return pa.table({"n": [int(event.value or b"") for event in events]}), events, []


def write(folder: Path, name: str, numbers: range) -> None:
    (folder / name).write_text("".join(f"{n}\n" for n in numbers))


@pytest.fixture
def ahead(tmp_path: Path) -> Iterator[ReadAhead]:
    write(tmp_path, "1", range(20))
    reader = FileReader("source stops, stream", tmp_path)
    reader.seek({})
    opened = ReadAhead(reader, decode, LIMIT, 0.0)
    yield opened
    opened.close()


def numbers(ahead: ReadAhead) -> list[int]:
    return list(ahead.batch().decoded[0]["n"].to_pylist())


def test_each_event_comes_once_and_in_order(ahead: ReadAhead) -> None:
    assert [numbers(ahead) for _ in range(4)] == [[*range(8)], [*range(8, 16)], [*range(16, 20)], []]


def test_the_lag_counts_what_was_read_ahead(ahead: ReadAhead) -> None:
    ahead.batch()
    # The reader has begun the file, and the next eight lines were read ahead.
    assert ahead.lag() == {"1": 8}
    while ahead.batch().count:
        pass
    assert ahead.lag() == {}


def test_a_stream_is_drained_only_if_nothing_has_arrived_since(ahead: ReadAhead, tmp_path: Path) -> None:
    assert [len(numbers(ahead)) for _ in range(3)] == [8, 8, 4]
    ahead.lag()  # waits for the batch that was read ahead, which is empty
    write(tmp_path, "2", range(20, 22))
    later = ahead.batch()
    assert (later.count, later.drained) == (2, False)
    last = ahead.batch()
    assert (last.count, last.drained) == (0, True)


def test_an_error_of_what_was_read_ahead_comes_with_its_batch(ahead: ReadAhead, tmp_path: Path) -> None:
    (tmp_path / "2").write_text("fails\n")
    assert [len(numbers(ahead)) for _ in range(2)] == [8, 8]
    with pytest.raises(DataError, match="does not answer"):
        ahead.batch()


def test_nothing_is_read_after_the_end(ahead: ReadAhead) -> None:
    ahead.batch()
    ahead.close()
    assert ahead.lag() == {}
