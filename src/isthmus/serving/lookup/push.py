"""Check pushed rows against the definitions of their view, reporting all problems at once, and pack them for Redis."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np

from isthmus.features import clock
from isthmus.features.contract.schema import RESERVED, Column, ViewContract
from isthmus.features.errors import DataError, Problem, RequestError, one_of
from isthmus.features.values.columns import Ints, Values
from isthmus.features.values.entitykey import entity_keys
from isthmus.features.values.rows import RowCodec
from isthmus.serving.limits import Limits
from isthmus.serving.wire import decode
from isthmus.serving.wire.body import FAILURES, unreadable
from isthmus.serving.wire.errors import RowsError, TooLargeError, UnreadableError

EVENT, KNOWN = RESERVED[:2]

Raws = Mapping[str, msgspec.Raw]
Packed = tuple[ViewContract, list[bytes], list[bytes]]
"""A view definition, the Redis key of each row, and the packed rows."""

FIRST = clock.micros(datetime.min.replace(tzinfo=UTC))
"""Earliest time that has a date."""

_Moment = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | Annotated[datetime, msgspec.Meta(tz=True)]
_ANYTHING = msgspec.json.Decoder()
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_TIMES = msgspec.json.Decoder(list[_Moment])
_NULLABLE_TIMES = msgspec.json.Decoder(list[_Moment | None])
# Times without a zone are UTC, as in Feast.
_Local = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | datetime
_LOCAL_TIMES = msgspec.json.Decoder(list[_Local])
_NULLABLE_LOCAL_TIMES = msgspec.json.Decoder(list[_Local | None])
_NO_TIME = -(2**63)
_Second = Annotated[int, msgspec.Meta(ge=_NO_TIME, le=(2**63 - 1) // 10**6)]
_SECONDS = msgspec.json.Decoder(list[_Second | None])
_SECOND_ARRAYS = msgspec.json.Decoder(list[list[_Second] | None])
_FINER = re.compile(rb"\.\d{6}\d*[1-9]")
_A_TIME = "RFC 3339 text with a time zone, or whole microseconds since 1970 UTC"
_A_SECOND = "a list of whole seconds since 1970 UTC"


@dataclass(frozen=True, slots=True)
class Times:
    """Limits of times in a push, in microseconds since 1970 UTC: no event before `first`, and nothing after `now`."""

    first: int
    now: int


@dataclass(frozen=True, slots=True)
class PushFormat:
    """Names that differ between push formats: the request field of the view, and the column of known times."""

    view: str
    known: str


PUSH = PushFormat("push_source_name", KNOWN)
"""The format of `/push`: times have a zone or are whole microseconds."""
FEAST = PushFormat("feature_view_name", "created")
"""The format of Feast's remote online store: times without a zone are UTC, known times may be null, and UnixTimestamp
features are whole seconds."""


class PushedView:
    """One definition of a view, ready to check and pack pushed rows. Built once and reused by every push."""

    def __init__(self, project: str, view: ViewContract, form: PushFormat = PUSH) -> None:
        self._project = project
        self.view = view
        self._known = form.known
        self._codec = RowCodec(view)
        feast = form is FEAST
        self._readers: dict[str, Callable[[msgspec.Raw], list[Any]]] = {
            **{column.name: partial(_key, column) for column in view.keys},
            EVENT: partial(_times, _LOCAL_TIMES if feast else _TIMES),
            form.known: partial(_times, _NULLABLE_LOCAL_TIMES if feast else _TIMES),
            **{column.name: _seconds(column) if feast else _reader(column) for column in view.fields},
        }

    def pack(self, df: Raws, limits: Limits, times: Times) -> tuple[list[bytes], list[bytes]]:
        keys, event, known, features = self._read(df, limits, times)
        return entity_keys(self._project, self.view.keys, keys), self._codec.encode(event, known, features)

    def pack_known(self, df: Raws, limits: Limits, times: Times) -> tuple[list[bytes], list[bytes]] | None:
        rows = max((len(_ITEMS.decode(raw)) for raw in df.values()), default=0)
        absent = msgspec.Raw(msgspec.json.encode([None] * rows))
        features = {column.name: absent for column in self.view.fields}
        try:
            return self.pack({**features, **{name: df[name] for name in df if name in self._readers}}, limits, times)
        except (RequestError, DataError):
            return None

    def _read(
        self, df: Raws, limits: Limits, times: Times
    ) -> tuple[dict[str, list[Any]], Ints, Ints, dict[str, Values]]:
        problems: list[Problem] = []
        for name in df:
            if name not in self._readers:
                expected = one_of(self._readers)
                problems.append(Problem(f"df.{name}", f"is not a column of view {self.view.name}", expected))
        lists: dict[str, list[Any]] = {}
        for name, read in self._readers.items():
            if name in df:
                column = _column(name, df[name], read, limits.rows)
                if isinstance(column, Problem):
                    problems.append(column)
                else:
                    lists[name] = column
            elif name != self._known:
                problems.append(Problem(f"df.{name}", "is missing", "one value per row"))
        if lists:
            problems += _lengths(lists, limits.rows)
        known = [times.now if time is None else time for time in lists.get(self._known, [])]
        problems += _outside(EVENT, lists.get(EVENT, []), times) + _outside(self._known, known, Times(FIRST, times.now))
        features = {}
        for field in self.view.fields:
            if field.name in lists:
                try:
                    features[field.name] = decode.values(lists[field.name], field)
                except RequestError as error:
                    problems.append(Problem(f"df.{field.name}", error.found, error.expected))
        if problems:
            raise RowsError("df", problems)
        limits.require_values("df", len(lists[EVENT]), len(self.view.fields))
        event = np.array(lists[EVENT], np.int64)
        keys = {key.name: lists[key.name] for key in self.view.keys}
        return keys, event, np.array(known or [times.now] * len(event), np.int64), features


def pack_all(
    declared: Sequence[PushedView], older: Sequence[PushedView], df: Raws, limits: Limits, times: Times
) -> list[Packed]:
    """Check pushed rows, and pack them for each definition of their view, so that a push survives a change of the view.

    `df` maps column names to JSON text. The first result is for the first definition in `declared` (those of the
    current and the next contract) whose columns are exactly those of the rows. If none has them, raises RowsError with
    the problems for `declared[0]`. Each other definition in `declared` and `older` ignores unknown columns and uses
    null for missing features. It has no result if a key is missing or a value is invalid. `times` has the earliest and
    latest time that a row may have. Raises UnreadableError if a column is not JSON, and TooLargeError if the rows
    exceed `limits`.
    """
    refusals = []
    for first in declared:
        try:
            own = [(first.view, *first.pack(df, limits, times))]
        except RowsError as error:
            refusals.append(error)
            continue
        remaining = [pushed for pushed in (*declared, *older) if pushed is not first]
        fitting = [(pushed.view, pushed.pack_known(df, limits, times)) for pushed in remaining]
        return own + [(view, *rows) for view, rows in fitting if rows is not None]
    raise refusals[0]


def first_per_table(parts: Sequence[Packed]) -> list[Packed]:
    """Keep the first result of `pack_all` for each offline table, so that a table gets each row only once."""
    return list({part[0].table: part for part in reversed(parts)}.values())


def _key(column: Column, raw: msgspec.Raw) -> list[Any]:
    return decode.keys({column.name: raw}, {column.name: column})[column.name]


def _reader(column: Column) -> Callable[[msgspec.Raw], list[Any]]:
    if column.dtype.name == "UnixTimestamp":
        return partial(_times, _NULLABLE_TIMES)
    return partial(decode.decode_field, column=column)


def _seconds(column: Column) -> Callable[[msgspec.Raw], list[Any]]:
    """Return the decoder of a feature in Feast's format: times are whole seconds, and the smallest one means null."""
    match column.dtype.name:
        case "UnixTimestamp":
            return lambda raw: [_micros(value) for value in _decode(raw, _SECONDS, _A_SECOND)]
        case "Array(UnixTimestamp)":
            return partial(_second_arrays, column)
    return _reader(column)


def _second_arrays(column: Column, raw: msgspec.Raw) -> list[Any]:
    arrays = _decode(raw, _SECOND_ARRAYS, _A_SECOND)
    decode.require_size("", arrays, column)
    return [None if array is None else [_micros(value) for value in array] for array in arrays]


def _micros(seconds: int | None) -> int | None:
    if seconds is None or seconds == _NO_TIME:
        return None
    if seconds * 10**6 < -(2**63):
        raise RequestError("", f"{seconds} is too early", expected=_A_SECOND)
    return seconds * 10**6


def _times(decoder: msgspec.json.Decoder[list[Any]], raw: msgspec.Raw) -> list[Any]:
    text = bytes(raw)
    if b"\\" in text:
        # An escape such as "\u002b01:00" may hide "+01:00", so decode escapes first.
        text = msgspec.json.encode(_decode(raw, _ANYTHING, "a list"))
    values = _decode(msgspec.Raw(text), decoder, f"a list of times: {_A_TIME}")
    if finer := _FINER.search(text):
        # Do not round: two rows could become one.
        raise RequestError("", f"a time has the fraction {finer[0].decode()}", expected="microseconds at most")
    return [value if value is None or isinstance(value, int) else clock.micros(_zoned(value)) for value in values]


def _zoned(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


def _column(name: str, raw: msgspec.Raw, read: Callable[[msgspec.Raw], list[Any]], most: int) -> list[Any] | Problem:
    try:
        return read(raw)
    except UnreadableError as error:
        raise UnreadableError(f"df.{name}", error.found, expected=error.expected) from error
    except RequestError as error:
        more = _wrong(name, raw, read, most) - 1
        also = f", and {more:,} more rows are wrong" if more > 0 else ""
        return Problem(f"df.{name}", error.found + also, error.expected)


def _wrong(name: str, raw: msgspec.Raw, read: Callable[[msgspec.Raw], list[Any]], most: int) -> int:
    try:
        items = _ITEMS.decode(raw)
    except msgspec.ValidationError:
        return 1
    decode.rows("df", {name: items}, most)
    wrong = 0
    for item in items:
        try:
            read(msgspec.Raw(b"[" + bytes(item) + b"]"))
        except RequestError:
            wrong += 1
    return wrong


def _lengths(lists: Mapping[str, list[Any]], most: int) -> list[Problem]:
    try:
        decode.rows("df", lists, most)
    except TooLargeError:
        raise
    except RequestError as error:
        return [Problem(error.where, error.found, error.expected)]
    return []


def _outside(name: str, values: list[int], times: Times) -> list[Problem]:
    """Describe times outside the allowed range. A row from the future would hide the current row."""
    wrong = [row for row, at in enumerate(values) if not times.first <= at <= times.now]
    if not wrong:
        return []
    row, more = wrong[0], f", and {len(wrong) - 1:,} more rows" if len(wrong) > 1 else ""
    now, first = clock.moment(times.now).isoformat(), clock.moment(times.first).isoformat()
    word, expected = "is before the year 1", f"no later than {now}, which is {times.now}"
    if values[row] > times.now:
        word = "is later than the server's time"
    elif values[row] >= FIRST:
        word = "is too old to be pushed to the history"
        expected = (
            f"{first} or later: add older rows to the source of the view, or raise `push_days` in [server.limits]"
        )
    return [Problem(f"df.{name}", f"{values[row]} at `list[{row}]`{more} {word}", expected)]


def _decode(raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any], expected: str) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise RequestError("", str(error).replace("$", "list"), expected=expected) from error
    except FAILURES as error:
        raise unreadable("", bytes(raw), error) from error
