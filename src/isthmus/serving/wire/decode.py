"""Columns of a request: decoded by the types of the contract, with no Python work per value."""

import math
from collections.abc import Iterable, Mapping, Set
from types import GenericAlias
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from isthmus.features.contract.contract import Column
from isthmus.features.errors import RequestError
from isthmus.features.types import SCALARS, Array
from isthmus.features.values.columns import Values, from_python, other_size
from isthmus.serving.wire.errors import TooLargeError
from isthmus.serving.wire.unreadable import FAILURES, unreadable

_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Float = float | Literal["NaN", "Infinity", "-Infinity"]
_PYTHON: dict[str, Any] = {
    "Bool": bool,
    "Int32": _Int32,
    "Int64": _Int64,
    "Float32": _Float,
    "Float64": _Float,
    "UnixTimestamp": _Int64,
    "String": str,
    "Bytes": bytes,
}
_WORDS = {
    "Bool": "true or false",
    "Int32": "whole numbers of 32 bits",
    "Int64": "whole numbers of 64 bits",
    "Float32": 'numbers, "NaN", "Infinity" and "-Infinity"',
    "Float64": 'numbers, "NaN", "Infinity" and "-Infinity"',
    "UnixTimestamp": "whole microseconds since 1970 UTC",
    "String": "strings",
    "Bytes": "Base64 strings",
}
_PYTHON |= {Array(scalar).name: GenericAlias(list, (_PYTHON[scalar.name],)) for scalar in SCALARS}
_WORDS |= {Array(scalar).name: f"lists of {_WORDS[scalar.name]}" for scalar in SCALARS}
_KEYS = {name: msgspec.json.Decoder(GenericAlias(list, (python,))) for name, python in _PYTHON.items()}
_FIELDS = {name: msgspec.json.Decoder(GenericAlias(list, (python | None,))) for name, python in _PYTHON.items()}


def keys(given: Mapping[str, msgspec.Raw], known: Mapping[str, Column]) -> dict[str, list[Any]]:
    """The join keys of a request: name to values, none of them null.

    Args:
        given: name to a JSON array.
        known: every join key of the contract by its name.

    Raises:
        RequestError: a name is no join key, or a value has another type.
    """
    columns = {}
    for name, raw in given.items():
        column = known.get(name)
        if column is None:
            raise RequestError(f"entities.{name}", "is no join key", expected=_one_of(known))
        columns[name] = _decode(f"entities.{name}", raw, column, _KEYS)
    return columns


def entities(
    given: Mapping[str, msgspec.Raw], known: Mapping[str, Column], request: Mapping[str, Column], optional: Set[str]
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """The join keys of a lookup, and the request fields among them. A field named like a join key is that key's value.

    Args:
        given: name to a JSON array.
        known: every join key of the contract by its name.
        request: the request fields that are needed.
        optional: those of them that may be left out.

    Raises:
        RequestError: a field is missing, a name is neither of them, or a value has another type.
    """
    for name, column in request.items():
        if name not in given and name not in optional:
            raise RequestError(f"entities.{name}", "is missing, which a request transform takes",
                               expected=f"a list of {_WORDS[column.dtype.name]} ({column.dtype.name})")  # fmt: skip
    for name in given:
        if request and name not in known and name not in request:
            raise RequestError(f"entities.{name}", "is no join key, and no request field of what is asked for",
                               expected=_one_of({*known, *request}))  # fmt: skip
    found = keys({name: raw for name, raw in given.items() if name in known or name not in request}, known)
    fields = {name: found[name] if name in found else field(given[name], column, "entities")
              for name, column in request.items() if name in given}  # fmt: skip
    return found, fields


def field(raw: msgspec.Raw, column: Column, part: str = "request") -> list[Any]:
    """The values of one field as a lookup answers with them; None is null.

    Args:
        raw: a JSON array.
        column: the field.
        part: the part of the request that holds it, for a message.

    Raises:
        RequestError: a value has another type, or an array another size.
    """
    values = _decode(f"{part}.{column.name}", raw, column, _FIELDS)
    require_size(f"{part}.{column.name}", values, column)
    match column.dtype.name:
        case "Float32" | "Float64" if b'"' in bytes(raw):
            return [float(value) if isinstance(value, str) else value for value in values]
        case "Array(Float32)" | "Array(Float64)":
            return [None if array is None else list(map(float, array)) for array in values]
    return values


def require_size(where: str, arrays: list[Any], column: Column) -> None:
    """Checks that arrays have the declared size, if there is one.

    Raises:
        RequestError: one has another.
    """
    if column.size is not None and (other := other_size(arrays, column.size)):
        raise RequestError(where, f"an array of {other[1]} elements at `list[{other[0]}]`",
                           expected=f"arrays of {column.size} elements")  # fmt: skip


def rows(where: str, columns: Mapping[str, list[Any]], most: int) -> int:
    """How many rows some columns have.

    Args:
        where: the part of the request that holds the columns.
        columns: column name to its values.
        most: how many they may have.

    Raises:
        RequestError: they have none, or not the same number.
        TooLargeError: they have too many.
    """
    lengths = {name: len(values) for name, values in columns.items()}
    count = max(lengths.values(), default=0)
    if min(lengths.values(), default=0) != count:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise RequestError(where, f"the columns differ in length: {found}", expected="one value per row in each")
    if count == 0:
        raise RequestError(where, "there is no row", expected="at least one value per column")
    if count > most:
        raise TooLargeError(where, f"{count:,} rows", expected=f"{most:,} at most", remedy="ask in several requests")
    return count


def values(data: list[Any], column: Column, part: str = "request") -> Values:
    """The NumPy form of a field.

    Args:
        data: its values.
        column: the field.
        part: the part of the request that holds it, for a message.

    Raises:
        RequestError: a number is too large for its type.
    """
    with np.errstate(over="ignore"):
        found = from_python(data, column.dtype)
    if column.dtype.name == "Array(Float32)":
        wrong = [row for row, array in enumerate(data) if array is not None and _beyond(found.data[row], array)]
    elif column.dtype.name == "Float32":
        wrong = [row for row in np.flatnonzero(np.isinf(found.data)).tolist() if math.isfinite(data[row])]
    else:
        return found
    if wrong:
        raise RequestError(f"{part}.{column.name}", f"{data[wrong[0]]} at `list[{wrong[0]}]` is too large",
                           expected="numbers of 32 bits (Float32)")  # fmt: skip
    return found


def _beyond(narrow: "np.ndarray[Any, Any]", wide: list[float]) -> bool:
    """Whether a number became infinite on its way to 32 bits."""
    return bool((np.isinf(narrow) & np.isfinite(wide)).any())


def _decode(where: str, raw: msgspec.Raw, column: Column, decoders: Mapping[str, Any]) -> list[Any]:
    try:
        decoded: list[Any] = decoders[column.dtype.name].decode(raw)
    except msgspec.ValidationError as error:
        expected = f"a list of {_WORDS[column.dtype.name]} ({column.dtype.name})"
        # msgspec takes the texts that stand for numbers as an enumeration.
        found = str(error).replace("$", "list").replace("Invalid enum value", "Expected a number, got")
        raise RequestError(where, found, expected=expected) from error
    except FAILURES as error:
        raise unreadable(where, bytes(raw), error) from error
    return decoded


def _one_of(names: Iterable[str]) -> str:
    return "one of " + (", ".join(sorted(names)) or "none")
