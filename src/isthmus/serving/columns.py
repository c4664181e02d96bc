"""Columns of a request: decoded by the types of the contract, with no Python work per value."""

from collections.abc import Iterable, Mapping
from types import GenericAlias
from typing import Annotated, Any

import msgspec

from isthmus.features.columns import Values, from_python
from isthmus.features.contract import Column
from isthmus.features.errors import RequestError
from isthmus.features.types import SCALARS, Array
from isthmus.serving.refusals import TooLargeError
from isthmus.serving.unreadable import FAILURES, unreadable

_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_PYTHON: dict[str, Any] = {
    "Bool": bool,
    "Int32": _Int32,
    "Int64": _Int64,
    "Float32": float,
    "Float64": float,
    "UnixTimestamp": _Int64,
    "String": str,
    "Bytes": bytes,
}
_WORDS = {
    "Bool": "true or false",
    "Int32": "whole numbers of 32 bits",
    "Int64": "whole numbers of 64 bits",
    "Float32": "numbers",
    "Float64": "numbers",
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


def field(raw: msgspec.Raw, column: Column) -> list[Any]:
    """The values of one request field; None is null.

    Raises:
        RequestError: a value has another type.
    """
    return _decode(f"request.{column.name}", raw, column, _FIELDS)


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


def values(data: list[Any], column: Column) -> Values:
    """The NumPy form of a request field."""
    return from_python(data, column.dtype)


def _decode(where: str, raw: msgspec.Raw, column: Column, decoders: Mapping[str, Any]) -> list[Any]:
    try:
        decoded: list[Any] = decoders[column.dtype.name].decode(raw)
    except msgspec.ValidationError as error:
        expected = f"a list of {_WORDS[column.dtype.name]} ({column.dtype.name})"
        raise RequestError(where, str(error).replace("$", "list"), expected=expected) from error
    except FAILURES as error:
        raise unreadable(where, bytes(raw), error) from error
    return decoded


def _one_of(names: Iterable[str]) -> str:
    return "one of " + (", ".join(sorted(names)) or "none")
