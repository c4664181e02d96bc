"""Answers to lookups as columns that grow: an answer adds its bytes to them, and keeps nothing else in memory."""

from isthmus.serving.recorder.batch import ANSWER, PACK, Group, ViewRows
from isthmus.serving.recorder.columns import COLUMNS, Answer, Reader

TEMPLATES = 64
"""Of the requests for the same features, in a batch. Requests beyond these are written whole."""
WHOLE = (b"", b"")
ROW_BYTES = 25
"""Of a stored row."""


class Lookups:
    """The answers of a batch to requests for the same features, which `reader` has."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        # Grown in place: many small objects would leave no memory that is warm for the next lookup.
        self._answers, self._requests = bytearray(), bytearray()
        self._stored = [bytearray() for _ in range(len(reader.views) * COLUMNS)]
        self._row = len(reader.views) * ROW_BYTES
        self._templates = {WHOLE: 0}
        # Nearly every request has those of the one before: two comparisons, where a look-up would hash them.
        self._head, self._tail = WHOLE
        self._place = 0

    def add(self, answer: Answer, caller: int) -> int:
        """Adds an answer; returns the bytes that it adds."""
        body = answer.body
        head, tail = self._head, self._tail
        if not (body.startswith(head) and body.endswith(tail) and len(body) >= len(head) + len(tail)) or not head:
            head, tail = self._find(body)
        request = body[len(head) : len(body) - len(tail)]
        size = len(request)
        self._answers += PACK(answer.sequence, answer.at, answer.seconds, caller, answer.rows, self._place, size)
        self._requests += request
        for column, part in zip(self._stored, answer.stored):  # noqa: B905 - 0.1 us
            column += part
        return size + ANSWER.itemsize + answer.rows * self._row

    def _find(self, body: bytes) -> tuple[bytes, bytes]:
        """The ends of a request around the values of its entities.

        They may lie elsewhere in a body of another form, which is what they are with the rest between them all the same.
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
        """The columns as they are written."""
        stored = [bytes(column) for column in self._stored]
        views = [
            ViewRows(view.name, view.hash, *stored[n * COLUMNS : (n + 1) * COLUMNS])
            for n, view in enumerate(self.reader.views)
        ]
        return self.reader.group(
            answers=bytes(self._answers), requests=bytes(self._requests), views=tuple(views),
            templates=tuple(self._templates),
        )  # fmt: skip
