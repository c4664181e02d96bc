"""A batch of recorded answers: columns of bytes, with a length and a checksum before them.

A segment is a file of batches of one server process, one behind the other. The process may be killed while it writes:
what is not whole at the end of a segment is no batch.

    magic     4 bytes   ISRB
    version   1 byte
    length    4 bytes   of the payload
    checksum  4 bytes   CRC-32 of the payload
    payload             MessagePack of `Batch`

All numbers are little-endian.
"""

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from isthmus.features import clock
from isthmus.features.clock import Status

MAGIC = b"ISRB"
VERSION = 2
HEAD = struct.Struct("<4sBII")

PACK = struct.Struct("<qqfiiii").pack
ANSWER = np.dtype(
    [("sequence", "<i8"), ("at", "<i8"), ("seconds", "<f4"), ("caller", "<i4"), ("rows", "<i4"), ("template", "<i4"),
     ("length", "<i4")]
)  # fmt: skip
"""Of each answer, in the order of `PACK`: its number in the process, its present in microseconds, the seconds from the
request to the end of the answer, its places in `Batch.callers` and `Group.templates`, the rows of its request, and that
request's bytes in `Group.requests`."""

Array = np.ndarray[Any, Any]


class ViewRows(msgspec.Struct, frozen=True, array_like=True):
    """The stored rows of a view behind the answers of a group, each row of a request in order.

    Attributes:
        view: its name.
        hash: of its contract.
        content: int64, the content hash of each row; 0 where the answer has no value of it.
        event: int64 microseconds, 0 where Redis had no row.
        known: likewise.
        status: uint8, codes of `Status`.
    """

    view: str
    hash: str
    content: bytes
    event: bytes
    known: bytes
    status: bytes


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Answers of one kind by the same reader: a service, a list of features, or a model.

    Attributes:
        route: "lookup", "predict", "infer" or "generate"; a request of the last two is one row.
        contract: hash of the contract that it was answered under.
        package: digest of the package; empty for a lookup.
        variant: precision and threads with which it ran, `int8/1`; empty for a lookup.
        answers: records of `ANSWER`.
        requests: the bytes of each request between the two ends of its template.
        views: the stored rows behind them.
        outputs: float32, what the model said, `width` numbers a row; of a text how many tokens its prompt has, and how
            many were said.
        digest: uint64, of each row's inputs of the model, or of what request transforms computed of it, or of
            the tensors that answer a request, or of the tokens of a prompt and its text; else empty.
        hashed: join keys whose values in the requests are keyed hashes.
        templates: ends of requests, which most of them share: the names of features are there once. With its ends, a
            request is the body as it came, JSON.
    """

    route: str
    contract: str
    package: str
    variant: str
    answers: bytes
    requests: bytes
    views: tuple[ViewRows, ...]
    outputs: bytes
    width: int
    digest: bytes
    hashed: tuple[str, ...]
    templates: tuple[tuple[bytes, bytes], ...]


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Answers that were written together.

    Attributes:
        run: of the server process, in hex.
        number: of the batch in the run; those of dropped batches are missing.
        written: microseconds since 1970 UTC by the clock of the machine.
        dropped: answers that the run has dropped before.
        runtime: what computed the predictions: the versions of its libraries, and the processor.
        callers: names of API keys; the empty one is that of a request without a key.
        groups: the answers.
    """

    run: str
    number: int
    written: int
    dropped: int
    runtime: str
    callers: tuple[str, ...]
    groups: tuple[Group, ...]


_COLUMNS = ("answers", "requests", "outputs", "digest")
_VIEW_COLUMNS, _VIEW_BYTES = ("content", "event", "known", "status"), (8, 8, 8, 1)
_LEAST, _MOST = (clock.micros(datetime(*day, tzinfo=UTC)) for day in ((1, 1, 1), (9999, 12, 31)))
_HASH = re.compile("[0-9a-z]{0,64}").fullmatch
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Batch)


class DamagedBatchError(ValueError):
    """What is no batch, where one should begin."""


class OtherVersionError(ValueError):
    """A batch of another version of Isthmus."""


def encoded(batch: Batch) -> bytearray:
    """A batch as it stands in a segment."""
    whole = bytearray(HEAD.size)
    _ENCODER.encode_into(batch, whole, HEAD.size)
    payload = memoryview(whole)[HEAD.size :]
    HEAD.pack_into(whole, 0, MAGIC, VERSION, len(payload), zlib.crc32(payload))
    return whole


def batches(segment: bytes | bytearray) -> Iterator[Batch]:
    """Yield the batches of a segment, also the batches behind one that cannot be read.

    Raises:
        DamagedBatchError: a part of the segment cannot be read. It is raised at the end.
        OtherVersionError: the next batch is of another version.
    """
    place, problem = 0, ""
    while place < len(segment):
        if len(segment) - place < HEAD.size:
            problem = problem or f"ends {len(segment) - place} bytes into the head of a batch"
            break
        magic, version, length, checksum = HEAD.unpack_from(segment, place)
        if magic != MAGIC:
            problem = problem or f"has no batch at byte {place:,}"
            break
        if version != VERSION:
            raise OtherVersionError(f"has a batch of version {version} at byte {place:,}")
        place += HEAD.size
        payload = memoryview(segment)[place : place + length]
        if len(payload) < length:
            problem = problem or f"ends {len(payload):,} bytes into a batch of {length:,}"
            break
        found = _decoded(payload) if zlib.crc32(payload) == checksum else "is not what was written"
        if isinstance(found, Batch):
            yield found
        else:
            problem = problem or f"has a batch at byte {place:,} that {found}"
        # No other place is looked at: a request within a batch may hold what seems to be a batch.
        place += length
    if problem:
        raise DamagedBatchError(problem)


def _decoded(payload: memoryview) -> Batch | str:
    """Return a batch, or a description of what is wrong with it."""
    try:
        batch = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"cannot be read ({error})"
    if not (_LEAST <= batch.written <= _MOST and 0 < batch.number < 1 << 53 and 0 <= batch.dropped < 1 << 63):
        return "has numbers outside their range"
    if not all(_fits(group, len(batch.callers)) for group in batch.groups):
        return "has a column whose length differs from the number of answers, or a value outside its range"
    return batch


def _fits(group: Group, callers: int) -> bool:
    """Return whether the columns of a group have the right lengths and all values are in range."""
    if len(group.answers) % ANSWER.itemsize or not _HASH(group.contract):
        return False
    found = np.frombuffer(group.answers, ANSWER)
    rows = int(found["rows"].sum(dtype=np.int64))
    columns = [
        (getattr(view, name), size)
        for view in group.views
        for name, size in zip(_VIEW_COLUMNS, _VIEW_BYTES, strict=True)
    ]
    places = (("rows", 1 << 31), ("length", 1 << 31), ("template", len(group.templates)), ("caller", callers))
    return (
        int(found["length"].sum(dtype=np.int64)) == len(group.requests)
        and all(bool(((found[name] >= 0) & (found[name] < most)).all()) for name, most in places)
        and bool(((found["at"] >= _LEAST) & (found["at"] <= _MOST) & (found["sequence"] >= 0)).all())
        and all(len(column) == rows * size for column, size in columns)
        and all(max(view.status, default=0) < len(Status) for view in group.views)
        and group.width >= 0
        and len(group.outputs) == rows * group.width * 4
        and len(group.digest) in (0, rows * 8)
    )


def count(batch: Batch) -> int:
    """The number of answers in a batch."""
    return sum(len(group.answers) // ANSWER.itemsize for group in batch.groups)


def size(batch: Batch) -> int:
    """The bytes of the columns of a batch as the table has them, each request with its ends."""
    columns = (len(getattr(group, name)) for group in batch.groups for name in _COLUMNS)
    views = (view for group in batch.groups for view in group.views)
    ends = (_ends(group) for group in batch.groups)
    return sum(columns) + sum(len(getattr(view, name)) for view in views for name in _VIEW_COLUMNS) + sum(ends)


def _ends(group: Group) -> int:
    lengths = np.array([len(head) + len(tail) for head, tail in group.templates], np.int64)
    return int(lengths[np.frombuffer(group.answers, ANSWER)["template"]].sum())


def merged(groups: Sequence[Group]) -> list[Group]:
    """The groups, those of the same reader as one: its columns are bytes."""
    alike: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        views = tuple((view.view, view.hash) for view in group.views)
        reader = group.route, group.contract, group.package, group.variant, group.hashed, views
        shared = *reader, group.width, group.templates
        # An answer that computes nothing has no digest.
        alike.setdefault((*shared, not group.digest), []).append(group)
    return [own[0] if len(own) == 1 else _merged(own) for own in alike.values()]


def _merged(groups: Sequence[Group]) -> Group:
    columns = {name: b"".join([getattr(group, name) for group in groups]) for name in _COLUMNS}
    views = tuple(
        msgspec.structs.replace(
            own[0], **{name: b"".join([getattr(view, name) for view in own]) for name in _VIEW_COLUMNS}
        )
        for own in zip(*(group.views for group in groups), strict=True)
    )
    return msgspec.structs.replace(groups[0], **columns, views=views)
