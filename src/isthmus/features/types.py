"""The value types of features, by Feast's names."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataType:
    """A scalar feature type.

    Attributes:
        name: Feast's name of the type.
        numpy: little-endian NumPy code of a fixed-width type (`<f4`), or None for variable length.
        arrow: name of the Arrow type that holds it.
    """

    name: str
    numpy: str | None
    arrow: str

    def __repr__(self) -> str:
        return self.name


Bool = DataType("Bool", "|u1", "bool")
Int32 = DataType("Int32", "<i4", "int32")
Int64 = DataType("Int64", "<i8", "int64")
Float32 = DataType("Float32", "<f4", "float")
Float64 = DataType("Float64", "<f8", "double")
UnixTimestamp = DataType("UnixTimestamp", "<i8", "timestamp[us, tz=UTC]")
String = DataType("String", None, "string")
Bytes = DataType("Bytes", None, "binary")

TYPES = {t.name: t for t in (Bool, Int32, Int64, Float32, Float64, UnixTimestamp, String, Bytes)}
KEY_TYPES = (Int32, Int64, String)
