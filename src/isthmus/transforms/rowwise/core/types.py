"""Spark's types in a graph, and the common type of several expressions in Spark's ANSI mode."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper


@dataclass(frozen=True)
class SqlType:
    """A Spark type. `tensor` is its ONNX type: whole numbers below 32 bits are int32, for which runtimes have kernels.

    `rank` orders numeric types by width; -1 for other types. An array has elements that are never null, and the same
    `size` in every row.
    """

    name: str
    tensor: int
    rank: int = -1
    low: int = 0
    high: int = 0
    element: "SqlType | None" = None
    size: int = 0

    @property
    def integral(self) -> bool:
        return 0 <= self.rank < FLOAT.rank

    @property
    def fractional(self) -> bool:
        return self.rank >= FLOAT.rank

    @property
    def numeric(self) -> bool:
        return self.rank >= 0

    @property
    def numpy(self) -> np.dtype[np.generic]:
        return helper.tensor_dtype_to_np_dtype(self.tensor)

    def __str__(self) -> str:
        return self.name


def _whole(name: str, bits: int, rank: int) -> SqlType:
    tensor = TensorProto.INT64 if bits == 64 else TensorProto.INT32
    return SqlType(name, tensor, rank, -(1 << bits - 1), (1 << bits - 1) - 1)


VOID = SqlType("void", TensorProto.BOOL)
BOOLEAN = SqlType("boolean", TensorProto.BOOL)
BYTE, SHORT = _whole("tinyint", 8, 0), _whole("smallint", 16, 1)
INT, LONG = _whole("int", 32, 2), _whole("bigint", 64, 3)
FLOAT, DOUBLE = SqlType("float", TensorProto.FLOAT, 4), SqlType("double", TensorProto.DOUBLE, 5)
STRING = SqlType("string", TensorProto.STRING)
DATE = SqlType("date", TensorProto.INT32, low=INT.low, high=INT.high)
"""Days since 1970."""
TIMESTAMP = SqlType("timestamp", TensorProto.INT64, low=LONG.low, high=LONG.high)
"""Microseconds since 1970 UTC."""

TYPES = {kind.name: kind for kind in (BOOLEAN, BYTE, SHORT, INT, LONG, FLOAT, DOUBLE, STRING, DATE, TIMESTAMP)}


def element_of(kind: SqlType) -> str:
    return str(TensorProto.DataType.Name(kind.tensor)).lower()


def array_of(element: SqlType, size: int) -> SqlType:
    return SqlType(f"array<{element}>", element.tensor, element=element, size=size)


def common(kinds: Iterable[SqlType]) -> SqlType | None:
    result: SqlType | None = VOID
    for kind in kinds:
        result = None if result is None else _pair(result, kind)
    return result


def _pair(left: SqlType, right: SqlType) -> SqlType | None:
    if left == right or right == VOID:
        return left
    if left == VOID:
        return right
    if left.numeric and right.numeric:
        wide = max(left, right, key=lambda kind: kind.rank)
        # A float cannot hold every whole number, so Spark's ANSI mode uses double.
        return DOUBLE if wide == FLOAT and left.rank != right.rank else wide
    if {left, right} == {DATE, TIMESTAMP}:
        return TIMESTAMP
    return None
