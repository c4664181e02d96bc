"""ONNX graphs as bytes: what stands in one, and graphs of one node. A serving host has a runtime and no ONNX library.

Read are the fields of onnx.proto that graphs of row functions have; all others are passed over.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ELEMENTS = {1: "float", 6: "int32", 7: "int64", 8: "string", 9: "bool", 11: "double"}
"""TensorProto.DataType by its numbers."""
NUMPY: dict[str, Any] = {
    "float": np.float32, "int32": np.int32, "int64": np.int64, "string": object, "bool": np.bool_, "double": np.float64,
}  # fmt: skip
_NUMBERS = {element: number for number, element in ELEMENTS.items()}
_IR_VERSION = 9
_OPSETS = {b"": 20, b"ai.onnx.ml": 2}
"""The versions of ONNX's operators that are known here, by their domain."""


class UnreadableError(Exception):
    """The bytes hold what is not known here. No error of a user's: whoever reads has another way."""


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        operator: its operator.
        inputs: the tensors that it takes.
        outputs: those that it gives.
        attributes: numbers, texts as bytes, or lists of these, by name.
        written: its attributes as they stand in the file.
    """

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    written: tuple[bytes, ...]


@dataclass(frozen=True)
class Tensor:
    """A constant of an element type. Texts have dtype object."""

    element: str
    data: np.ndarray[Any, Any]


def read(model: bytes) -> tuple[list[Node], dict[str, Tensor]]:
    """The nodes of a model's graph in their order, and its constants by name.

    Raises:
        UnreadableError: its operators are those of another version, or a constant is written in a form that is not
            known here.
    """
    nodes, constants, graph = [], {}, b""
    for number, value in _fields(model):
        if number == 7:
            graph = value
        elif number == 8 and (said := dict(_fields(value))) and said[2] != _OPSETS.get(said.get(1, b"")):
            raise UnreadableError(f"operators of version {said[2]}")
    for number, value in _fields(graph):
        if number == 1:
            nodes.append(_node(value))
        elif number == 5:
            name, tensor = _tensor(value)
            constants[name] = tensor
    return nodes, constants


def single(node: Node, takes: Sequence[tuple[str, tuple[int, ...]]], gives: str, shape: tuple[int, ...]) -> bytes:
    """A model of nothing but one node of ONNX's own, whose inputs are called 0, 1, and so on, and its output y.

    Args:
        node: the node.
        takes: element and shape of each input.
        gives: the element of its output.
        shape: the shape of its output.
    """
    called = [str(place) for place in range(len(takes))]
    body = [*(_written(1, name) for name in called), _written(2, "y"), _written(4, node.operator)]
    body += [_written(5, attribute) for attribute in node.written]
    inputs = [_written(11, _described(name, *one)) for name, one in zip(called, takes, strict=True)]
    parts = [_written(1, b"".join(body)), _written(2, "node"), *inputs, _written(12, _described("y", gives, shape))]
    return _written(1, _IR_VERSION) + _written(7, b"".join(parts)) + _written(8, _written(2, _OPSETS[b""]))


# --- protocol buffers


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: whole numbers, floats, and bytes of all else."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield number, value - (1 << 64) if value >> 63 else value
        elif kind == 2:
            size, place = _varint(message, place)
            yield number, message[place : place + size]
            place += size
        elif kind == 5:
            yield number, struct.unpack_from("<f", message, place)[0]
            place += 4
        else:
            raise UnreadableError(f"a field of wire type {kind}")


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _node(message: bytes) -> Node:
    inputs, outputs, operator, written = [], [], "", []
    for number, value in _fields(message):
        if number == 1:
            inputs.append(value.decode())
        elif number == 2:
            outputs.append(value.decode())
        elif number == 4:
            operator = value.decode()
        elif number == 5:
            written.append(value)
    return Node(operator, tuple(inputs), tuple(outputs), dict(map(_attribute, written)), tuple(written))


def _attribute(message: bytes) -> tuple[str, Any]:
    """Its name and its value; None where that is of a kind that no row function has."""
    name, found, many = "", None, []
    for number, value in _fields(message):
        if number == 1:
            name = value.decode()
        elif number in (2, 3, 4):
            found = value
        elif number in (8, 9):
            many.append(value)
    return name, found if found is not None else many or None


def _tensor(message: bytes) -> tuple[str, Tensor]:
    shape, element, name, texts, raw = [], "", "", [], None
    for number, value in _fields(message):
        if number == 1:
            shape.append(value)
        elif number == 2:
            element = ELEMENTS.get(value, "")
        elif number == 6:
            texts.append(value.decode())
        elif number == 8:
            name = value.decode()
        elif number == 9:
            raw = value
    if element == "string":
        data = np.array([*texts, None], object)[:-1]
    elif element and raw is not None:
        data = np.frombuffer(raw, np.dtype(NUMPY[element]).newbyteorder("<"))
    else:
        raise UnreadableError(f"constant {name}")
    return name, Tensor(element, data.reshape(shape))


def _written(number: int, value: int | str | bytes) -> bytes:
    """A field."""
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    content = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | 2) + _number(len(content)) + content


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _described(name: str, element: str, shape: tuple[int, ...]) -> bytes:
    """A ValueInfoProto."""
    dimensions = b"".join(_written(1, _written(1, size)) for size in shape)
    tensor = _written(1, _NUMBERS[element]) + _written(2, dimensions)
    return _written(1, name) + _written(2, _written(1, tensor))
