"""The value types of features, named as in Feast."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataType:
    """A feature type. `numpy` is its little-endian code (`<f4`), None for variable length; `element` is for arrays."""

    name: str
    numpy: str | None
    element: "DataType | None" = None

    def __repr__(self) -> str:
        return self.name

    # Properties, not fields: the fingerprint of a teacher with a DataType covers its fields.
    @property
    def spark(self) -> str:
        return f"array<{self.element.spark}>" if self.element else _SPARK[self.name]

    @property
    def tensor(self) -> str:
        """ONNX element type of a model input of this type; empty for Bytes and arrays."""
        return _TENSORS.get(self.name, "")


class Array(DataType):
    """Any number of values of one scalar type, without nulls. An empty array is not null."""

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
INPUTS = SCALARS[:-1]
"""Types of one value that a model can read: numbers, times and text, but not Bytes."""
VECTOR = Array(Float32)
"""Type of an array that a model can read, as one number per element, if its size is declared."""
KEY_TYPES = (Bool, Int32, Int64, UnixTimestamp, String, Bytes)
TYPES: dict[str, DataType] = {t.name: t for t in (*SCALARS, *map(Array, SCALARS))}

_SPARK = {
    "Bool": "boolean", "Int32": "int", "Int64": "bigint", "Float32": "float", "Float64": "double",
    "UnixTimestamp": "timestamp", "String": "string", "Bytes": "binary",
}  # fmt: skip
_TENSORS = {
    "Bool": "bool", "Int32": "int32", "Int64": "int64", "Float32": "float", "Float64": "double",
    "UnixTimestamp": "int64", "String": "string",
}  # fmt: skip


def is_readable(dtype: DataType | None, size: int | None) -> bool:
    """Return True if a model can read values of this type, of an array of `size` elements."""
    return dtype in INPUTS if size is None else dtype == VECTOR and size >= 1


def element_names(name: str, size: int | None) -> list[str]:
    """Return the names of the numbers of a model input: its own, or NAME[0], NAME[1], … of an array."""
    return [name] if size is None else [f"{name}[{place}]" for place in range(size)]
