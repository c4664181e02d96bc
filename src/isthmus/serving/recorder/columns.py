"""From answers in memory to a group of a batch."""

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from isthmus.features.contract.schema import SEPARATOR, Column, ViewContract
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.types import Bytes
from isthmus.features.values.columns import Values
from isthmus.features.values.entitykey import encode_keys
from isthmus.serving.recorder.batch import PACK, Group, ViewRows
from isthmus.serving.recorder.digest import digests, tensors_digest, text_digest

Stored = bytes | tuple[bytes, bytes, bytes, bytes]
"""Of a view the packed rows behind an answer, if they say all; else their columns: see `ViewRows`."""
STORED_BYTES, FED_BYTES = 25, 256
"""Of a stored row, and about those of a row that a model was fed."""
SMALL = 1024
"""Bytes of packed rows: of more of them, the columns are kept, which are shorter."""


class Reader(msgspec.Struct, frozen=True, gc=False):
    """What is the same for all answers to requests for the same features, or of the same model.

    Attributes:
        route: "lookup", "predict", "infer" or "generate".
        views: that it reads, each with the NumPy type of its packed rows.
        private: join keys that are written as keyed hashes.
        plain: whether an answer needs neither digests nor keyed hashes.
        row: bytes of a row of an answer in memory, about.
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
    def of(cls, route: str, plan: LookupPlan, package: str, variant: str, private: Iterable[str]) -> "Reader":
        """The reader with this plan; `private` are views."""
        contract = plan.contract
        keys = {
            column.name: column for name in private if name in contract.views for column in contract.views[name].keys
        }
        views = tuple((view, plan.codecs[view.name].nothing.dtype) for view in plan.views)
        row = len(views) * STORED_BYTES + (0 if route == "lookup" else FED_BYTES)
        return cls(route, contract.hash, package, variant, views, keys, route == "lookup" and not keys, row)

    def group(
        self, *, outputs: bytes = b"", width: int = 0, digest: bytes = b"", hashed: tuple[str, ...] = (), **columns: Any
    ) -> Group:
        """Answers as they are written."""
        return Group(
            self.route, self.contract, self.package, self.variant, outputs=outputs, width=width, digest=digest,
            hashed=hashed, **columns,
        )  # fmt: skip


class Answer(msgspec.Struct, gc=False):
    """An answer in memory.

    Attributes:
        at: the present that it was answered for, microseconds since 1970 UTC.
        body: of its request.
        keys: the join keys of the request.
        stored: of each view what `stored_of` has. Whatever else an answer has would stay in memory, and that of the
            next one is cold then.
        outputs: of the model; None for a lookup. Of a text the tokens of its prompt and those that were said, a list
            that grows until the text ends.
        json: bytes of the body before the tensors that it has in binary form; 0 if it has none.
        size: bytes of the outputs, where they are tensors or tokens.
        inputs: of the model, or the outputs of request transforms, by transform.
        sequence: its number in the process.
        seconds: from the request to the end of the answer.
        caller: the name of its API key.
    """

    reader: Reader
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
    """The keyed hashes of values of a join key, in hex; null has none."""
    salt = column.name.encode()
    packed = iter(encode_keys([column], {column.name: [value for value in values if value is not None]}))
    return [
        "" if value is None else hashlib.blake2b(salt + next(packed), digest_size=16, key=secret).hexdigest()
        for value in values
    ]


def without_keys(body: bytes, keys: Mapping[str, Sequence[Any]], private: Mapping[str, Column], secret: bytes) -> bytes:
    """The body of a request with the hashes of private join keys."""
    request = orjson.loads(body)
    for name, column in private.items():
        for part in ("entities", "request"):
            if (values := request.get(part, {}).get(name)) is not None:
                if name in keys:
                    values = keys[name]
                elif column.dtype == Bytes:
                    # A request field alone: nothing that was read has this key.
                    values = msgspec.convert(values, list[bytes | None])
                request[part][name] = hashes(secret, column, values)
    return orjson.dumps(request)


def text_of(body: bytes, json: int) -> bytes:
    """The body of a request for tensors as JSON, in which what follows its own JSON is Base64."""
    if not json:
        return body
    return orjson.dumps({"json": orjson.Fragment(body[:json]), "binary": b64encode(body[json:]).decode()})


def grouped(answers: Sequence[Answer], secret: bytes, callers: dict[str, int]) -> list[Group]:
    """Answers as groups; `callers` gets a place for each new one."""
    by_reader: dict[int, list[Answer]] = {}
    for answer in answers:
        by_reader.setdefault(id(answer.reader), []).append(answer)
    return [_group(part, secret, callers) for part in by_reader.values()]


def _group(part: Sequence[Answer], secret: bytes, callers: dict[str, int]) -> Group:
    reader = part[0].reader
    if reader.route == "infer":
        requests = [text_of(answer.body, answer.json) for answer in part]
    elif reader.private:
        requests = [without_keys(answer.body, answer.keys, reader.private, secret) for answer in part]
    else:
        requests = [answer.body for answer in part]
    caller = [callers.setdefault(answer.caller, len(callers)) for answer in part]
    outputs, width, digest = b"", 0, b""
    if reader.route == "predict":
        joined = np.concatenate([answer.outputs for answer in part])
        outputs, width = joined.astype("<f4", copy=False).tobytes(), 1 if joined.ndim == 1 else joined.shape[1]
        digest = digests(_together([answer.inputs for answer in part])).tobytes()
    elif reader.route == "infer":
        digest = np.array([tensors_digest(answer.outputs) for answer in part], np.uint64).tobytes()
    elif reader.route == "generate":
        counts = [[len(tokens) for tokens in answer.outputs] for answer in part]
        outputs, width = np.array(counts, "<f4").tobytes(), 2
        digest = np.array([text_digest(*answer.outputs) for answer in part], np.uint64).tobytes()
    elif part[0].inputs:
        digest = digests(_together([computed(answer.inputs) for answer in part])).tobytes()
    return reader.group(
        answers=b"".join(
            PACK(answer.sequence, answer.at, answer.seconds, place, answer.rows, 0, len(request))
            for answer, place, request in zip(part, caller, requests, strict=True)
        ),
        requests=b"".join(requests),
        views=tuple(
            ViewRows(view.name, view.hash, *columns_of(dtype, [answer.stored[n] for answer in part]))
            for n, (view, dtype) in enumerate(reader.views)
        ),
        outputs=outputs,
        width=width,
        digest=digest,
        hashed=tuple(reader.private),
        templates=((b"", b""),),
    )


def computed(outputs: Mapping[str, Mapping[str, Values]]) -> dict[str, Values]:
    """The outputs of request transforms in one mapping."""
    return {f"{name}{SEPARATOR}{field}": values for name, own in outputs.items() for field, values in own.items()}


def stored_of(reader: Reader, answers: Mapping[str, ViewAnswer]) -> list[Stored]:
    """What an answer keeps of the answers of a reader's views, in its order."""
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
    """The columns of a view over several answers."""
    try:
        # One call over all answers each: taken apart answer by answer, these would cost ten times as much.
        return _taken_apart(b"".join(stored), dtype)  # type: ignore[arg-type]  # most often
    except TypeError:
        parts = [_taken_apart(own, dtype) if isinstance(own, bytes) else own for own in stored]
        content, event, known, status = (b"".join(column) for column in zip(*parts, strict=True))
        return content, event, known, status


def _taken_apart(rows: bytes, dtype: Any) -> tuple[bytes, bytes, bytes, bytes]:
    packed = np.frombuffer(rows, dtype)
    return packed["content"].tobytes(), packed["event"].tobytes(), packed["known"].tobytes(), bytes(len(packed))


def _together(parts: Sequence[Mapping[str, Values]]) -> dict[str, Values]:
    return {
        name: Values(
            np.concatenate([part[name].data for part in parts]), np.concatenate([part[name].valid for part in parts])
        )
        for name in parts[0]
    }
