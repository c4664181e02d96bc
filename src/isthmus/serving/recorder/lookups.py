"""Answers to lookups as columns that grow: an answer adds its bytes to them, and keeps nothing else in memory."""

from collections.abc import Sequence
from itertools import islice
from typing import cast

from isthmus.serving.recorder.batch import ANSWER, PACK, Group, ViewRows
from isthmus.serving.recorder.columns import Answer, Reader, columns_of

TEMPLATES = 64
"""Of the requests for the same features, in a batch. Requests beyond these are written whole."""
WHOLE = (b"", b"")


class Lookups:
    """The answers of a batch to requests for the same features, which `reader` has."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        # Grown in place: many small objects would leave no memory that is warm for the next lookup.
        self._answers, self._requests = bytearray(), bytearray()
        self._stored = [[bytearray() for _ in range(4)] for _ in reader.views]
        self._templates = {WHOLE: 0}
        # Nearly every request has those of the one before: two comparisons, where the dictionary would hash them.
        self._head, self._tail = WHOLE
        self._place = 0

    def add(self, answers: Sequence[Answer], callers: dict[str, int]) -> int:
        """Adds answers, and returns how many bytes that takes; `callers` gets a place for each new one."""
        # First all that may fail: columns of different lengths would be no batch.
        views = enumerate(self.reader.views)
        stored = [columns_of(dtype, [answer.stored[n] for answer in answers]) for n, (_, dtype) in views]
        heads, requests = [], []
        templates = len(self._templates)
        for answer in answers:
            body, head, tail = answer.body, self._head, self._tail
            if not (body.startswith(head) and body.endswith(tail) and len(body) >= len(head) + len(tail) > 0):
                head, tail = self._find(body)
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
            # A body of another form may be nearly all ends.
            size += sum(len(head) + len(tail) for head, tail in islice(self._templates, templates, None))
        for columns, parts in zip(self._stored, stored, strict=True):
            for column, part in zip(columns, parts, strict=True):
                column += part
                size += len(part)
        return size

    def _find(self, body: bytes) -> tuple[bytes, bytes]:
        """The ends of a request, around the values of its entities in most.

        In a body of another form they may be elsewhere: with what is between them, they are the body all the same.
        """
        begin = body.find(b"[", body.find(b'"entities"')) + 1
        end = body.find(b"}", begin)
        ends = (body[:begin], body[end:]) if begin and end > 0 else WHOLE
        if len(self._templates) >= TEMPLATES:
            ends = ends if ends in self._templates else WHOLE
        self._place = self._templates.setdefault(ends, len(self._templates))
        self._head, self._tail = ends
        return ends

    def group(self) -> Group:
        """The columns as they are written, once all answers are there."""
        views = [
            ViewRows(view.name, view.hash, *map(_bytes, columns))
            for columns, (view, _) in zip(self._stored, self.reader.views, strict=True)
        ]
        return self.reader.group(
            answers=_bytes(self._answers), requests=_bytes(self._requests), views=tuple(views),
            templates=tuple(self._templates),
        )  # fmt: skip


def _bytes(column: bytearray) -> bytes:
    # MessagePack has one form of both, and a copy of a batch keeps the interpreter from the event loop.
    return cast("bytes", column)
