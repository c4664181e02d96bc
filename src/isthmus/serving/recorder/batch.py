"""`AnswerBatch`, a batch of recorded answers, and its file format: columns of bytes behind a length and a checksum.

A segment is a file of batches, back to back. Its last batch may be incomplete: the process may have been killed.

    magic     4 bytes   ISRB
    version   1 byte
    length    4 bytes   of the payload, little-endian
    checksum  4 bytes   CRC-32 of the payload, little-endian
    payload             MessagePack of `AnswerBatch`, whose columns are little-endian, too
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
"""One record per answer, in the order of `PACK`: its number in the process, its request time in microseconds, the
seconds from the request to the end of the answer, its indexes into `AnswerBatch.callers` and
`AnswerGroup.templates`, the number of rows requested, and the length of its request in `AnswerGroup.requests`."""

Array = np.ndarray[Any, Any]


class StoredViewRows(msgspec.Struct, frozen=True, array_like=True):
    """The stored rows of one view that the answers of a group used, in request order.

    Attributes:
        hash: hash of the view's contract.
        content: int64, content hash of each row; 0 if the answer has no value for the row.
        event: int64, event time in microseconds; 0 if Redis had no row.
        known: int64, time in microseconds when the row became known; 0 if Redis had no row.
        status: uint8, codes of `Status`.
    """

    view: str
    hash: str
    content: bytes
    event: bytes
    known: bytes
    status: bytes


class AnswerGroup(msgspec.Struct, frozen=True, array_like=True):
    """Answers from one service, one list of features, or one model.

    Attributes:
        route: "lookup", "predict", "infer" or "generate"; a request to "infer" or "generate" counts as one row.
        package: digest of the package; empty for a lookup.
        variant: precision, number of threads and any GPU, such as `int8/1`; empty for a lookup.
        answers: records of `ANSWER`.
        requests: the part of each request between the head and the tail of its template.
        outputs: float32 model outputs, `width` per row; for a text, the token counts of its prompt and itself.
        digest: uint64 per row, a hash of the model's inputs, of the outputs of request transforms, of the output
            tensors, or of the tokens of a prompt and its text; empty if nothing was computed.
        hashed: join keys whose values in the requests are keyed hashes.
        templates: (head, tail) pairs shared by most requests; head, request and tail are the original JSON body.
    """

    route: str
    contract: str
    package: str
    variant: str
    answers: bytes
    requests: bytes
    views: tuple[StoredViewRows, ...]
    outputs: bytes
    width: int
    digest: bytes
    hashed: tuple[str, ...]
    templates: tuple[tuple[bytes, bytes], ...]


class AnswerBatch(msgspec.Struct, frozen=True, array_like=True):
    """Answers that were written together.

    Attributes:
        run: random id of the server process, in hex.
        number: sequence number of the batch in the run; numbers of dropped batches are missing.
        written: microseconds since 1970 UTC by the machine's clock.
        dropped: number of answers this run has dropped so far.
        runtime: library versions and processor that computed the predictions.
        callers: names of API keys; empty for a request without a key.
    """

    run: str
    number: int
    written: int
    dropped: int
    runtime: str
    callers: tuple[str, ...]
    groups: tuple[AnswerGroup, ...]


_COLUMNS = ("answers", "requests", "outputs", "digest")
_VIEW_COLUMNS, _VIEW_BYTES = ("content", "event", "known", "status"), (8, 8, 8, 1)
_LEAST, _MOST = (clock.micros(datetime(*day, tzinfo=UTC)) for day in ((1, 1, 1), (9999, 12, 31)))
_HASH = re.compile("[0-9a-z]{0,64}").fullmatch
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnswerBatch)


class DamagedBatchError(ValueError):
    """The segment has bytes that are not a valid batch."""


class OtherVersionError(ValueError):
    """The batch was written by another version of Isthmus."""


def encoded(batch: AnswerBatch) -> bytearray:
    whole = bytearray(HEAD.size)
    _ENCODER.encode_into(batch, whole, HEAD.size)
    payload = memoryview(whole)[HEAD.size :]
    HEAD.pack_into(whole, 0, MAGIC, VERSION, len(payload), zlib.crc32(payload))
    return whole


def batches(segment: bytes | bytearray) -> Iterator[AnswerBatch]:
    """Yield the batches of recorded answers in the bytes of a spool file, to collect or count the answers.

    Skips a batch with a wrong checksum, and stops where no batch begins or the bytes end within a batch. In both cases,
    raises a DamagedBatchError after the last readable batch. Raises an OtherVersionError at the first batch of another
    version of the format.
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
        decoded = _decoded(payload) if zlib.crc32(payload) == checksum else "does not match its checksum"
        if isinstance(decoded, AnswerBatch):
            yield decoded
        else:
            problem = problem or f"has a batch at byte {place:,} that {decoded}"
        # Do not search for the next magic bytes: a request inside a batch may contain them.
        place += length
    if problem:
        raise DamagedBatchError(problem)


def _decoded(payload: memoryview) -> AnswerBatch | str:
    try:
        batch = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"cannot be read ({error})"
    if not (_LEAST <= batch.written <= _MOST and 0 < batch.number < 1 << 53 and 0 <= batch.dropped < 1 << 63):
        return "has numbers outside their range"
    if not all(_fits(group, len(batch.callers)) for group in batch.groups):
        return "has a column whose length differs from the number of answers, or a value outside its range"
    return batch


def _fits(group: AnswerGroup, callers: int) -> bool:
    if len(group.answers) % ANSWER.itemsize or not _HASH(group.contract):
        return False
    records = np.frombuffer(group.answers, ANSWER)
    rows = int(records["rows"].sum(dtype=np.int64))
    columns = [
        (getattr(view, name), size)
        for view in group.views
        for name, size in zip(_VIEW_COLUMNS, _VIEW_BYTES, strict=True)
    ]
    places = (("rows", 1 << 31), ("length", 1 << 31), ("template", len(group.templates)), ("caller", callers))
    return (
        int(records["length"].sum(dtype=np.int64)) == len(group.requests)
        and all(bool(((records[name] >= 0) & (records[name] < most)).all()) for name, most in places)
        and bool(((records["at"] >= _LEAST) & (records["at"] <= _MOST) & (records["sequence"] >= 0)).all())
        and all(len(column) == rows * size for column, size in columns)
        and all(max(view.status, default=0) < len(Status) for view in group.views)
        and group.width >= 0
        and len(group.outputs) == rows * group.width * 4
        and len(group.digest) in (0, rows * 8)
    )


def count(batch: AnswerBatch) -> int:
    return sum(len(group.answers) // ANSWER.itemsize for group in batch.groups)


def table_bytes(batch: AnswerBatch) -> int:
    columns = (len(getattr(group, name)) for group in batch.groups for name in _COLUMNS)
    views = (view for group in batch.groups for view in group.views)
    ends = (_ends(group) for group in batch.groups)
    return sum(columns) + sum(len(getattr(view, name)) for view in views for name in _VIEW_COLUMNS) + sum(ends)


def _ends(group: AnswerGroup) -> int:
    lengths = np.array([len(head) + len(tail) for head, tail in group.templates], np.int64)
    return int(lengths[np.frombuffer(group.answers, ANSWER)["template"]].sum())


def merged(groups: Sequence[AnswerGroup]) -> list[AnswerGroup]:
    alike: dict[tuple[Any, ...], list[AnswerGroup]] = {}
    for group in groups:
        views = tuple((view.view, view.hash) for view in group.views)
        reader = group.route, group.contract, group.package, group.variant, group.hashed, views
        shared = *reader, group.width, group.templates
        # An answer without computed values has no digest, and digests must cover every answer of a group.
        alike.setdefault((*shared, not group.digest), []).append(group)
    return [own[0] if len(own) == 1 else _merged(own) for own in alike.values()]


def _merged(groups: Sequence[AnswerGroup]) -> AnswerGroup:
    columns = {name: b"".join([getattr(group, name) for group in groups]) for name in _COLUMNS}
    views = tuple(
        msgspec.structs.replace(
            own[0], **{name: b"".join([getattr(view, name) for view in own]) for name in _VIEW_COLUMNS}
        )
        for own in zip(*(group.views for group in groups), strict=True)
    )
    return msgspec.structs.replace(groups[0], **columns, views=views)
