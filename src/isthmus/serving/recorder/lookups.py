"""Recorded lookups as growing columns: an answer appends its bytes and leaves no object in memory."""

from collections.abc import Sequence
from itertools import islice
from typing import cast

from isthmus.serving.recorder.batch import ANSWER, PACK, AnswerGroup, StoredViewRows
from isthmus.serving.recorder.columns import AnswerReader, RecordedAnswer, columns_of

TEMPLATES = 64
"""Templates per batch for requests of the same features. Requests with further templates are written whole."""
WHOLE = (b"", b"")


class Lookups:
    """The answers of a batch to requests for the same features."""

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
        """Add answers and return the bytes this takes. Adds new names to `callers`."""
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
        """Split a request around the values of its entities and return its head and tail.

        In a body of another format the split may fall elsewhere; head, middle and tail are still the whole body.
        """
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
