"""The value types of features, by Feast's names."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataType:
    """A feature type.

    Attributes:
        name: Feast's name of the type.
        numpy: little-endian NumPy code of a fixed-width type (`<f4`), or None for variable length.
        element: the type of an array's elements; None for a scalar.
    """

    name: str
    numpy: str | None
    element: "DataType | None" = None

    def __repr__(self) -> str:
        return self.name


class Array(DataType):
    """Any number of values of one scalar type, none of them null. An empty array is not null."""

    __slots__ = ()

    def __init__(self, element: DataType) -> None:
        super().__init__(f"Array({element!r})", None, element)


Bool = DataType("Bool", "|u1")
Int32 = DataType("Int32", "<i4")
Int64 = DataType("Int64", "<i8")
Float32 = DataType("Float32", "<f4")
Float64 = DataType("Float64", "<f8")
UnixTimestamp = DataType("UnixTimestamp", "<i8")
String = DataType("String", None)
Bytes = DataType("Bytes", None)

SCALARS = (Bool, Int32, Int64, Float32, Float64, UnixTimestamp, String, Bytes)
TYPES: dict[str, DataType] = {t.name: t for t in (*SCALARS, *map(Array, SCALARS))}
KEY_TYPES = (Bool, Int32, Int64, UnixTimestamp, String, Bytes)


def is_input(dtype: DataType) -> bool:
    """Whether a model can read values of a type: numbers, times and texts, but neither bytes nor arrays."""
    return dtype.element is None and dtype != Bytes
