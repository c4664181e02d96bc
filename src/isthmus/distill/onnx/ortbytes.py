"""Gives models in ORT format the same bytes every time, although ONNX Runtime writes their lists in random order."""

import struct
from typing import Any

from flatbuffers import encode, packer
from flatbuffers.builder import Builder
from flatbuffers.table import Table

IDENTIFIER = b"ORTM"
ALIGNMENT = 16

# From onnxruntime/core/flatbuffers/schema/ort.fbs. A field is a struct format for a scalar, "str", a table's name, or a
# list of these or of raw bytes; "!" marks an unordered list. None is a field that models do not use.
_TABLES: dict[str, tuple[Any, ...]] = {
    "Session": ("str", "Model", None, "Resolver"),
    "Model": ("q", ["Opset"], "str", "str", "str", "q", "str", "Graph", "str", ["Entry"]),
    "Graph": (["Tensor", "!"], ["Value", "!"], ["Node"], "I", ["Edge"], ["str"], ["str"], [None], "Optimizations"),
    "Tensor": ("str", "str", ["q"], "i", ["B"], ["str"], "q"),
    "Value": ("str", "str", "Type"),
    "Type": ("str", "b", "TensorType"),
    "TensorType": ("i", "Shape"),
    "Shape": (["Dimension"],),
    "Dimension": ("DimensionValue", "str"),
    "DimensionValue": ("b", "q", "str"),
    "Node": ("str", "str", "str", "i", "I", "str", "i", "str", ["str"], ["str"], ["Attribute"], ["i"], ["str"]),
    "Edge": ("I", ["Iii"], ["Iii"]),
    "Attribute": ("str", "str", "i", "f", "q", "str", "Tensor", None, ["f"], ["q"], ["str"], ["Tensor"], None),
    "Opset": ("str", "q"),
    "Entry": ("str", "str"),
    "Optimizations": ([None],),
    "Resolver": (["Operator", "!"],),
    "Operator": ("str", ["Argument", "!"]),
    "Argument": ("str", ["ArgumentIndex"]),
    "ArgumentIndex": ("b", "I"),
}
_TENSOR_TYPE = (1,)
_UNIQUE = ("Session", "Model", "Graph", "Tensor", ["Tensor"], ["Tensor", "!"], ["Value", "!"], ["Node"], ["B"])
"""Large kinds that never repeat: checking for equal parts would waste time."""


def canonical(model: bytes) -> bytes:
    """Rewrite the content of an ORT file so that equal models have equal bytes: sort its lists, and merge equal parts.

    Raises a ValueError if the format is unknown.
    """
    if model[4:8] != IDENTIFIER:
        raise ValueError("not a model in ORT format")
    root = encode.Get(packer.uoffset, model, 0)
    return _Writer(len(model)).file(_read("Session", Table(model, root)))


def operators(model: bytes) -> tuple[dict[str, int], set[tuple[str, str]]]:
    root = Table(model, encode.Get(packer.uoffset, model, 0))
    used, versions = _read("Resolver", _inner(root, 3))[0], _inner(root, 1)
    imported = _field(["Opset"], versions, versions.Pos + versions.Offset(6))
    names = [name.decode().split(":") for name, *_ in used or ()]
    return {domain.decode(): version for domain, (version,) in imported}, {(domain, name) for domain, name, _ in names}


def _inner(table: Table, slot: int) -> Table:
    position = table.Pos + table.Offset(4 + 2 * slot)
    return Table(table.Bytes, position + encode.Get(packer.uoffset, table.Bytes, position))


def _read(name: str, table: Table) -> list[Any]:
    fields = _TABLES[name]
    vtable = table.Pos - encode.Get(packer.soffset, table.Bytes, table.Pos)
    size = encode.Get(packer.voffset, table.Bytes, vtable)
    values: list[Any] = []
    for slot in range((size - 4) // 2):
        offset = table.Offset(4 + 2 * slot)
        if not offset:
            values.append(None)
        elif slot >= len(fields) or fields[slot] is None:
            raise ValueError(f"unknown field {slot} of {name}")
        else:
            values.append(_field(fields[slot], table, table.Pos + offset))
    if name == "Type" and values[1:2] not in ([], [None], [_TENSOR_TYPE]):
        raise ValueError("a value that is not a tensor")
    return values


def _field(kind: Any, table: Table, position: int) -> Any:
    if isinstance(kind, list):
        start = table.Vector(position - table.Pos)
        count = table.VectorLen(position - table.Pos)
        if kind[0] is None and count:
            raise ValueError("a list of unknown tables")
        if kind[0] == "B":
            return bytes(table.Bytes[start : start + count])
        step = 4 if kind[0] in _TABLES or kind[0] in ("str", None) else struct.calcsize("<" + kind[0])
        items = [_field(kind[0], table, start + step * place) for place in range(count)]
        return sorted(items, key=repr) if kind[-1] == "!" else items
    if kind == "str":
        return bytes(table.String(position))
    if kind in _TABLES:
        return _read(kind, Table(table.Bytes, position + encode.Get(packer.uoffset, table.Bytes, position)))
    return struct.unpack_from("<" + kind, table.Bytes, position)


class _Writer:
    """Writes a model file from its end to its start, and each equal part only once."""

    def __init__(self, size: int) -> None:
        self._builder = Builder(size)
        self._written: dict[str, int] = {}

    def file(self, session: list[Any]) -> bytes:
        self._builder.Finish(self._table("Session", session), file_identifier=IDENTIFIER)
        return bytes(self._builder.Output())

    def _table(self, name: str, values: list[Any]) -> int:
        fields = _TABLES[name]
        placed = [None if value is None else self._place(kind, value)
                  for kind, value in zip(fields, values, strict=False)]  # fmt: skip
        self._builder.StartObject(len(values))
        for slot, (kind, value) in enumerate(zip(fields, placed, strict=False)):
            if value is None:
                continue
            if isinstance(kind, list) or kind == "str" or kind in _TABLES:
                self._builder.PrependUOffsetTRelative(value)
            else:
                self._scalar(kind, value)
            self._builder.Slot(slot)
        return int(self._builder.EndObject())

    def _place(self, kind: Any, value: Any) -> Any:
        if isinstance(kind, str) and kind != "str" and kind not in _TABLES:
            return value
        if kind in _UNIQUE:
            return self._outside(kind, value)
        key = repr((kind, value))
        if key not in self._written:
            self._written[key] = self._outside(kind, value)
        return self._written[key]

    def _outside(self, kind: Any, value: Any) -> int:
        builder = self._builder
        if kind == "str":
            return int(builder.CreateString(value))
        if isinstance(kind, str):
            return self._table(kind, value)
        if kind[0] == "B":
            builder.StartVector(1, len(value), ALIGNMENT)
            builder.head -= len(value)
            builder.Bytes[builder.head : builder.head + len(value)] = value
            return int(builder.EndVector())
        outside = kind[0] == "str" or kind[0] in _TABLES or kind[0] is None
        items = [self._place(kind[0], item) for item in value]
        size = 4 if outside else struct.calcsize("<" + kind[0])
        builder.StartVector(size, len(items), 4 if outside or len(kind[0]) > 1 else size)
        for item in reversed(items):
            if outside:
                builder.PrependUOffsetTRelative(item)
            else:
                self._scalar(kind[0], item)
        return int(builder.EndVector())

    def _scalar(self, kind: str, value: tuple[Any, ...]) -> None:
        builder, data = self._builder, struct.pack("<" + kind, *value)
        builder.Prep(len(data) if len(kind) == 1 else 4, 0 if len(kind) == 1 else len(data))
        builder.head -= len(data)
        builder.Bytes[builder.head : builder.head + len(data)] = data
