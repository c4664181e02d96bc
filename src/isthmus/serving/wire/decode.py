"""Decode the columns of a request by the types of the contract, without Python work per value."""

import math
import re
from collections.abc import Mapping, Set
from types import GenericAlias
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from isthmus.features.contract.schema import Column
from isthmus.features.errors import RequestError, one_of
from isthmus.features.types import SCALARS, Array
from isthmus.features.values.columns import Values, first_wrong_size, from_python
from isthmus.serving.wire.body import FAILURES, unreadable
from isthmus.serving.wire.errors import TooLargeError

_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Float = float | Literal["NaN", "Infinity", "-Infinity"]
_NUMBERS = 'numbers, "NaN", "Infinity" and "-Infinity"'
_ROW = re.compile(r"`\$\[(\d+)\]")
_SCALARS: dict[str, tuple[Any, str]] = {
    "Bool": (bool, "true or false"),
    "Int32": (_Int32, "whole numbers of 32 bits"),
    "Int64": (_Int64, "whole numbers of 64 bits"),
    "Float32": (_Float, _NUMBERS),
    "Float64": (_Float, _NUMBERS),
    "UnixTimestamp": (_Int64, "whole microseconds since 1970 UTC"),
    "String": (str, "strings"),
    "Bytes": (bytes, "Base64 strings"),
}
_PYTHON = {name: python for name, (python, _) in _SCALARS.items()}
_WORDS = {name: words for name, (_, words) in _SCALARS.items()}
_PYTHON |= {Array(scalar).name: GenericAlias(list, (_PYTHON[scalar.name],)) for scalar in SCALARS}
_WORDS |= {Array(scalar).name: f"lists of {_WORDS[scalar.name]}" for scalar in SCALARS}
_KEYS = {name: msgspec.json.Decoder(GenericAlias(list, (python,))) for name, python in _PYTHON.items()}
_FIELDS = {name: msgspec.json.Decoder(GenericAlias(list, (python | None,))) for name, python in _PYTHON.items()}


def keys(raws: Mapping[str, msgspec.Raw], join_keys: Mapping[str, Column]) -> dict[str, list[Any]]:
    columns = {}
    for name, raw in raws.items():
        column = join_keys.get(name)
        if column is None:
            raise RequestError(f"entities.{name}", "is not a join key", expected=one_of(join_keys))
        columns[name] = _decode(f"entities.{name}", raw, column, _KEYS)
    return columns


def entities(
    raws: Mapping[str, msgspec.Raw], join_keys: Mapping[str, Column], request: Mapping[str, Column], optional: Set[str]
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Decode the `entities` of a lookup request. Return its join keys and its request fields, both by name.

    `raws` has the JSON of each column. `join_keys` are the join keys of all views, and `request` the request fields
    that the requested features need. Join keys, and the fields named in `optional`, may be missing. A request field
    with the name of a join key gets the values of the key. Raises a RequestError for another missing field, an unknown
    name, or a value of the wrong type.
    """
    for name, column in request.items():
        if name not in raws and name not in optional:
            raise RequestError(f"entities.{name}", "is missing, but a request transform needs it",
                               expected=f"a list of {_WORDS[column.dtype.name]} ({column.dtype.name})")  # fmt: skip
    for name in raws:
        if request and name not in join_keys and name not in request:
            raise RequestError(f"entities.{name}", "is neither a join key nor a request field of these features",
                               expected=one_of({*join_keys, *request}))  # fmt: skip
    columns = keys({name: raw for name, raw in raws.items() if name in join_keys or name not in request}, join_keys)
    fields = {name: columns[name] if name in columns else decode_field(raws[name], column, "entities")
              for name, column in request.items() if name in raws}  # fmt: skip
    return columns, fields


def decode_field(raw: msgspec.Raw, column: Column, part: str = "request") -> list[Any]:
    values = _decode(f"{part}.{column.name}", raw, column, _FIELDS)
    require_size(f"{part}.{column.name}", values, column)
    match column.dtype.name:
        case "Float32" | "Float64" if b'"' in bytes(raw):
            return [float(value) if isinstance(value, str) else value for value in values]
        case "Array(Float32)" | "Array(Float64)":
            return [None if array is None else list(map(float, array)) for array in values]
    return values


def require_size(where: str, arrays: list[Any], column: Column) -> None:
    if column.size is not None and (wrong := first_wrong_size(arrays, column.size)):
        raise RequestError(where, f"an array of {wrong[1]} elements at `list[{wrong[0]}]`",
                           expected=f"arrays of {column.size} elements")  # fmt: skip


def require_keys(needed: Mapping[str, Column], keys: Mapping[str, object]) -> None:
    for name, column in needed.items():
        if name not in keys:
            raise RequestError(f"entities.{name}", "is missing", expected=f"a list of {column.dtype} values")


def rows(where: str, columns: Mapping[str, list[Any]], most: int) -> int:
    lengths = {name: len(values) for name, values in columns.items()}
    count = max(lengths.values(), default=0)
    if min(lengths.values(), default=0) != count:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise RequestError(where, f"the columns differ in length: {shown}", expected="one value per row in each")
    if count == 0:
        raise RequestError(where, "has no rows", expected="at least one value per column")
    if count > most:
        raise TooLargeError(where, f"{count:,} rows", expected=f"{most:,} at most",
                            remedy="split it into several requests")  # fmt: skip
    return count


def values(data: list[Any], column: Column, part: str = "request") -> Values:
    with np.errstate(over="ignore"):
        values = from_python(data, column.dtype)
    if column.dtype.name == "Array(Float32)":
        # Finite numbers that became infinite as Float32.
        wrong = [row for row, array in enumerate(data) if array is not None
                 and (np.isinf(values.data[row]) & np.isfinite(array)).any()]  # fmt: skip
    elif column.dtype.name == "Float32":
        wrong = [row for row in np.flatnonzero(np.isinf(values.data)).tolist() if math.isfinite(data[row])]
    else:
        return values
    if wrong:
        raise RequestError(f"{part}.{column.name}", f"{data[wrong[0]]} at `list[{wrong[0]}]` is too large",
                           expected="numbers of 32 bits (Float32)")  # fmt: skip
    return values


def _decode(where: str, raw: msgspec.Raw, column: Column, decoders: Mapping[str, Any]) -> list[Any]:
    try:
        decoded: list[Any] = decoders[column.dtype.name].decode(raw)
    except msgspec.ValidationError as error:
        expected = f"a list of {_WORDS[column.dtype.name]} ({column.dtype.name})"
        message = str(error)
        remedy = "put each value in quotes" if column.dtype.name == "String" and "got `int`" in message else ""
        if place := _ROW.search(message):
            # Quote the raw JSON: no Python type can hold every JSON number.
            sent = bytes(msgspec.json.decode(raw, type=list[msgspec.Raw])[int(place[1])]).decode(errors="replace")
            message, expected = f"row {place[1]} is {sent:.60}", expected.removeprefix("a list of ")
        raise RequestError(where, message, expected=expected, remedy=remedy) from error
    except FAILURES as error:
        raise unreadable(where, bytes(raw), error) from error
    return decoded
