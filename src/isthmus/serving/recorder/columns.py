"""Convert answers to groups of a batch. Lookups extend columns in place, so an answer leaves no object in memory."""

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import msgspec
import numpy as np
import orjson

from isthmus.features.contract.schema import SEPARATOR, Column, ViewContract
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.types import Bytes
from isthmus.features.values.columns import Values, concatenated
from isthmus.features.values.entitykey import encode_keys
from isthmus.serving.recorder.batch import ANSWER, PACK, AnswerGroup, StoredViewRows
from isthmus.serving.recorder.digest import digests, tensors_digest, text_digest

Stored = bytes | tuple[bytes, bytes, bytes, bytes]
"""The rows of a view in an answer: packed in bytes if all are present and small, else the columns `content`, `event`,
`known` and `status` of `StoredViewRows`."""
STORED_BYTES, FED_BYTES = 25, 256
"""Approximate bytes of a stored row, and of the inputs of one model row."""
SMALL = 1024
"""Above this many bytes of packed rows, store columns instead, which are shorter."""


TEMPLATES = 64
"""Templates per batch for requests of the same features. Requests with further templates are written whole."""
WHOLE = (b"", b"")


class AnswerReader(msgspec.Struct, frozen=True, gc=False):
    """The data that recorded answers to the same kind of request have in common.

    Attributes:
        views: views it reads, each with the NumPy type of its packed rows.
        private: join keys that are written as keyed hashes.
        plain: True if an answer needs neither digests nor keyed hashes.
        row: approximate bytes of one answered row in memory.
    """

    route: str
    contract: str
    package: str
    variant: str
    views: tuple[tuple[ViewContract, Any], ...]
    private: Mapping[str, Column]
    plain: bool
    row: int

    @classmethod
    def of(cls, route: str, plan: LookupPlan, package: str, variant: str, private: Iterable[str]) -> "AnswerReader":
        contract = plan.contract
        keys = {
            column.name: column for name in private if name in contract.views for column in contract.views[name].keys
        }
        views = tuple((view, plan.codecs[view.name].nothing.dtype) for view in plan.views)
        row = len(views) * STORED_BYTES + (0 if route == "lookup" else FED_BYTES)
        return cls(route, contract.hash, package, variant, views, keys, route == "lookup" and not keys, row)

    def group(
        self, *, outputs: bytes = b"", width: int = 0, digest: bytes = b"", hashed: tuple[str, ...] = (), **columns: Any
    ) -> AnswerGroup:
        return AnswerGroup(
            self.route, self.contract, self.package, self.variant, outputs=outputs, width=width, digest=digest,
            hashed=hashed, **columns,
        )  # fmt: skip


class RecordedAnswer(msgspec.Struct, gc=False):
    """An answer in memory, waiting to be written.

    Attributes:
        at: request time in microseconds since 1970 UTC.
        stored: one `stored_entries` value per view, and no more: a long-lived object would leave the CPU cache cold.
        outputs: model outputs; None for a lookup. For generated text: the prompt's tokens and the generated tokens, a
            list that grows until the text ends.
        inputs: model inputs, or the outputs of request transforms by transform.
        json: length of the JSON part of a body that has binary tensors behind it; 0 without binary tensors.
        size: bytes of the outputs if they are tensors or tokens, else 0.
        sequence: number of the answer in the process.
        seconds: time from the request to the end of the answer.
        caller: name of the API key.
    """

    reader: AnswerReader
    at: int
    body: bytes
    keys: Mapping[str, Sequence[Any]]
    stored: list[Stored]
    rows: int
    outputs: Any = None
    inputs: Any = ()
    json: int = 0
    size: int = 0
    sequence: int = 0
    seconds: float = 0.0
    caller: str = ""


def hashes(secret: bytes, column: Column, values: Sequence[Any]) -> list[str]:
    salt = column.name.encode()
    packed = iter(encode_keys([column], {column.name: [value for value in values if value is not None]}))
    return [
        "" if value is None else hashlib.blake2b(salt + next(packed), digest_size=16, key=secret).hexdigest()
        for value in values
    ]


def without_keys(body: bytes, keys: Mapping[str, Sequence[Any]], private: Mapping[str, Column], secret: bytes) -> bytes:
    request = orjson.loads(body)
    for name, column in private.items():
        for part in ("entities", "request"):
            if (values := request.get(part, {}).get(name)) is not None:
                if name in keys:
                    values = keys[name]
                elif column.dtype == Bytes:
                    # The value is only a request field, so `keys` does not have its bytes decoded.
                    values = msgspec.convert(values, list[bytes | None])
                request[part][name] = hashes(secret, column, values)
    return orjson.dumps(request)


def json_length(body: bytes, json: int) -> bytes:
    if not json:
        return body
    return orjson.dumps({"json": orjson.Fragment(body[:json]), "binary": b64encode(body[json:]).decode()})


def to_groups(answers: Sequence[RecordedAnswer], secret: bytes, callers: dict[str, int]) -> list[AnswerGroup]:
    by_reader: dict[int, list[RecordedAnswer]] = {}
    for answer in answers:
        by_reader.setdefault(id(answer.reader), []).append(answer)
    return [_group(part, secret, callers) for part in by_reader.values()]


def _group(part: Sequence[RecordedAnswer], secret: bytes, callers: dict[str, int]) -> AnswerGroup:
    reader = part[0].reader
    if reader.route == "infer":
        requests = [json_length(answer.body, answer.json) for answer in part]
    elif reader.private:
        requests = [without_keys(answer.body, answer.keys, reader.private, secret) for answer in part]
    else:
        requests = [answer.body for answer in part]
    caller = [callers.setdefault(answer.caller, len(callers)) for answer in part]
    outputs, width, digest = b"", 0, b""
    if reader.route == "predict":
        joined = np.concatenate([answer.outputs for answer in part])
        outputs, width = joined.astype("<f4", copy=False).tobytes(), 1 if joined.ndim == 1 else joined.shape[1]
        digest = digests(concatenated([answer.inputs for answer in part])).tobytes()
    elif reader.route == "infer":
        digest = np.array([tensors_digest(answer.outputs) for answer in part], np.uint64).tobytes()
    elif reader.route == "generate":
        counts = [[len(tokens) for tokens in answer.outputs] for answer in part]
        outputs, width = np.array(counts, "<f4").tobytes(), 2
        digest = np.array([text_digest(*answer.outputs) for answer in part], np.uint64).tobytes()
    elif part[0].inputs:
        digest = digests(concatenated([computed(answer.inputs) for answer in part])).tobytes()
    return reader.group(
        answers=b"".join(
            PACK(answer.sequence, answer.at, answer.seconds, place, answer.rows, 0, len(request))
            for answer, place, request in zip(part, caller, requests, strict=True)
        ),
        requests=b"".join(requests),
        views=tuple(
            StoredViewRows(view.name, view.hash, *columns_of(dtype, [answer.stored[n] for answer in part]))
            for n, (view, dtype) in enumerate(reader.views)
        ),
        outputs=outputs,
        width=width,
        digest=digest,
        hashed=tuple(reader.private),
        templates=((b"", b""),),
    )


def computed(outputs: Mapping[str, Mapping[str, Values]]) -> dict[str, Values]:
    return {f"{name}{SEPARATOR}{field}": values for name, own in outputs.items() for field, values in own.items()}


def stored_entries(reader: AnswerReader, answers: Mapping[str, ViewAnswer]) -> list[Stored]:
    stored: list[Stored] = []
    for view, _ in reader.views:
        answer = answers[view.name]
        packed: Any = answer.columns.packed
        rows = packed.base
        if answer.complete and answer.event.base is packed and type(rows) is bytes and len(rows) <= SMALL:
            stored.append(rows)
        else:
            status = bytes(len(packed)) if answer.complete else answer.status.tobytes()
            stored.append((packed["content"].tobytes(), answer.event.tobytes(), answer.known.tobytes(), status))
    return stored


def columns_of(dtype: Any, stored: Sequence[Stored]) -> tuple[bytes, bytes, bytes, bytes]:
    try:
        # Decode all answers in one call: decoding them one by one takes ten times as long.
        return _unpacked(b"".join(stored), dtype)  # type: ignore[arg-type]  # most often
    except TypeError:
        parts = [_unpacked(own, dtype) if isinstance(own, bytes) else own for own in stored]
        content, event, known, status = (b"".join(column) for column in zip(*parts, strict=True))
        return content, event, known, status


def _unpacked(rows: bytes, dtype: Any) -> tuple[bytes, bytes, bytes, bytes]:
    packed = np.frombuffer(rows, dtype)
    return packed["content"].tobytes(), packed["event"].tobytes(), packed["known"].tobytes(), bytes(len(packed))


class Lookups:
    """The growing columns of a batch, for answers to lookups of the same features. `group` returns them."""

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        # Extend in place: many small objects would evict the CPU caches that the next lookup needs.
        self._answers, self._requests = bytearray(), bytearray()
        self._stored = [[bytearray() for _ in range(4)] for _ in reader.views]
        self._templates = {WHOLE: 0}
        # Most requests have the same ends as the previous one, and comparing them is cheaper than hashing them.
        self._head, self._tail = WHOLE
        self._place = 0

    def add(self, answers: Sequence[RecordedAnswer], callers: dict[str, int]) -> int:
        # Do everything that can fail first: columns of different lengths would make the batch invalid.
        views = enumerate(self.reader.views)
        stored = [columns_of(dtype, [answer.stored[n] for answer in answers]) for n, (_, dtype) in views]
        heads, requests = [], []
        templates = len(self._templates)
        for answer in answers:
            body, head, tail = answer.body, self._head, self._tail
            if not (body.startswith(head) and body.endswith(tail) and len(body) >= len(head) + len(tail) > 0):
                head, tail = self._split(body)
            request = body[len(head) : len(body) - len(tail)]
            requests.append(request)
            caller = callers.setdefault(answer.caller, len(callers))
            heads.append(
                PACK(answer.sequence, answer.at, answer.seconds, caller, answer.rows, self._place, len(request))
            )
        self._answers += b"".join(heads)
        self._requests += b"".join(requests)
        size = len(requests) * ANSWER.itemsize + sum(map(len, requests))
        if len(self._templates) > templates:
            # A body in an unusual format may consist almost entirely of its ends.
            size += sum(len(head) + len(tail) for head, tail in islice(self._templates, templates, None))
        for columns, parts in zip(self._stored, stored, strict=True):
            for column, part in zip(columns, parts, strict=True):
                column += part
                size += len(part)
        return size

    def _split(self, body: bytes) -> tuple[bytes, bytes]:
        """Split a body around its entities. In another format, the parts may differ but are still the whole body."""
        begin = body.find(b"[", body.find(b'"entities"')) + 1
        end = body.find(b"}", begin)
        ends = (body[:begin], body[end:]) if begin and end > 0 else WHOLE
        if len(self._templates) >= TEMPLATES:
            ends = ends if ends in self._templates else WHOLE
        self._place = self._templates.setdefault(ends, len(self._templates))
        self._head, self._tail = ends
        return ends

    def group(self) -> AnswerGroup:
        views = [
            StoredViewRows(view.name, view.hash, *map(_bytes, columns))
            for columns, (view, _) in zip(self._stored, self.reader.views, strict=True)
        ]
        return self.reader.group(
            answers=_bytes(self._answers), requests=_bytes(self._requests), views=tuple(views),
            templates=tuple(self._templates),
        )  # fmt: skip


def _bytes(column: bytearray) -> bytes:
    # MessagePack encodes both types alike, and copying a batch would block the event loop.
    return cast("bytes", column)
