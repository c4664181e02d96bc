"""From answers in memory to a group of a batch."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from isthmus.features.contract.contract import SEPARATOR, Column, ViewContract
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.types import Bytes
from isthmus.features.values.columns import Values
from isthmus.features.values.entitykey import encode_keys
from isthmus.serving.recorder.batch import Group, ViewRows
from isthmus.serving.recorder.digest import digests

ROW_BYTES = 64
"""Of a row of an answer in memory, besides its values."""


class Reader(msgspec.Struct, frozen=True, gc=False):
    """What is the same for all answers to requests for the same features, or of the same model.

    Attributes:
        route: "lookup" or "predict".
        views: that it reads, each with the NumPy type of its packed rows.
        private: join keys that are written as keyed hashes.
        row: bytes of a row of an answer in memory, about.
    """

    route: str
    contract: str
    package: str
    variant: str
    views: tuple[tuple[ViewContract, Any], ...]
    private: Mapping[str, Column]
    row: int

    @classmethod
    def of(cls, route: str, plan: LookupPlan, package: str, variant: str, private: Iterable[str]) -> "Reader":
        """The reader with this plan; `private` are views."""
        contract = plan.contract
        keys = {
            column.name: column for name in private if name in contract.views for column in contract.views[name].keys
        }
        views = tuple((view, plan.codecs[view.name].nothing.dtype) for view in plan.views)
        row = sum(codec.width + ROW_BYTES for codec in plan.codecs.values())
        return cls(route, contract.hash, package, variant, views, keys, row)


class Answer(msgspec.Struct, gc=False):
    """An answer in memory.

    Attributes:
        at: the present that it was answered for, microseconds since 1970 UTC.
        body: of its request.
        keys: the join keys of the request.
        stored: of each view the packed rows, their times unless they are those in the rows, and their status unless all
            are present. Whatever else an answer has would stay in memory, and that of the next one is cold then.
        outputs: of the model; None for a lookup.
        inputs: of the model, or the outputs of request transforms, by transform.
        sequence: its number in the process.
        seconds: from the request to the end of the answer.
        caller: the name of its API key.
    """

    reader: Reader
    at: int
    body: bytes
    keys: Mapping[str, Sequence[Any]]
    stored: list[tuple[Any, Any, Any]]
    rows: int
    outputs: Any = None
    inputs: Any = msgspec.field(default_factory=dict)
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


def grouped(answers: Sequence[Answer], secret: bytes, callers: dict[str, int]) -> list[Group]:
    """Answers as groups; `callers` gets a place for each new one."""
    by_reader: dict[int, list[Answer]] = {}
    for answer in answers:
        by_reader.setdefault(id(answer.reader), []).append(answer)
    return [_group(part, secret, callers) for part in by_reader.values()]


def _group(part: Sequence[Answer], secret: bytes, callers: dict[str, int]) -> Group:
    reader = part[0].reader
    if reader.private:
        requests = [without_keys(answer.body, answer.keys, reader.private, secret) for answer in part]
    else:
        requests = [answer.body for answer in part]
    caller = [callers.setdefault(answer.caller, len(callers)) for answer in part]
    outputs, width, digest = b"", 0, b""
    if reader.route == "predict":
        joined = np.concatenate([answer.outputs for answer in part])
        outputs, width = joined.astype("<f4", copy=False).tobytes(), 1 if joined.ndim == 1 else joined.shape[1]
        digest = digests(_together([answer.inputs for answer in part])).tobytes()
    elif part[0].inputs:
        digest = digests(_together([computed(answer.inputs) for answer in part])).tobytes()
    return Group(
        route=reader.route,
        contract=reader.contract,
        package=reader.package,
        variant=reader.variant,
        sequence=np.array([answer.sequence for answer in part], np.int64).tobytes(),
        at=np.array([answer.at for answer in part], np.int64).tobytes(),
        seconds=np.array([answer.seconds for answer in part], np.float32).tobytes(),
        caller=np.array(caller, np.int32).tobytes(),
        rows=np.array([answer.rows for answer in part], np.int32).tobytes(),
        length=np.array([*map(len, requests)], np.int32).tobytes(),
        requests=b"".join(requests),
        views=tuple(
            _view_rows(view, dtype, [answer.stored[n] for answer in part])
            for n, (view, dtype) in enumerate(reader.views)
        ),
        outputs=outputs,
        width=width,
        digest=digest,
        hashed=tuple(reader.private),
    )


def computed(outputs: Mapping[str, Mapping[str, Values]]) -> dict[str, Values]:
    """The outputs of request transforms in one mapping."""
    return {f"{name}{SEPARATOR}{field}": values for name, own in outputs.items() for field, values in own.items()}


def stored_of(reader: Reader, answers: Mapping[str, ViewAnswer]) -> list[tuple[Any, Any, Any]]:
    """What `Answer.stored` has of the answers of a reader's views, in its order."""
    stored: list[tuple[Any, Any, Any]] = []
    for view, _ in reader.views:
        answer = answers[view.name]
        packed: Any = answer.columns.packed
        event = answer.event
        rows = packed.base if type(packed.base) is bytes else packed
        times = None if event.base is packed else (event, answer.known)
        stored.append((rows, times, None if answer.complete else answer.status))
    return stored


def _view_rows(view: ViewContract, dtype: Any, stored: Sequence[tuple[Any, Any, Any]]) -> ViewRows:
    # One call over all answers each: taken apart answer by answer, these would cost ten times as much. Bytes, because
    # NumPy takes 11 us for each array of records.
    packed: Any = np.frombuffer(b"".join([rows for rows, _, _ in stored]), dtype)
    event, known, status = packed["event"], packed["known"], np.zeros(len(packed), np.uint8)
    if any(times is not None or statuses is not None for _, times, statuses in stored):
        event, known, place = event.copy(), known.copy(), 0
        for rows, times, statuses in stored:
            part = slice(place, place := place + memoryview(rows).nbytes // dtype.itemsize)
            if times is not None:
                event[part], known[part] = times
            if statuses is not None:
                status[part] = statuses
    return ViewRows(
        view.name, view.hash, packed["content"].astype(np.int64).tobytes(), event.tobytes(), known.tobytes(),
        status.tobytes(),
    )  # fmt: skip


def _together(parts: Sequence[Mapping[str, Values]]) -> dict[str, Values]:
    return {
        name: Values(
            np.concatenate([part[name].data for part in parts]), np.concatenate([part[name].valid for part in parts])
        )
        for name in parts[0]
    }
