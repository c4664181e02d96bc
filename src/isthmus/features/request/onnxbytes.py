"""ONNX graphs as bytes: reading one, and writing graphs of one node. A serving host has a runtime and no ONNX library.

Only the fields of onnx.proto that graphs of row functions use are read; all others are skipped.
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
"""The known versions of ONNX's operators, by domain."""


class UnreadableError(Exception):
    """The bytes hold something unknown here. Not a user's error: the caller falls back to the runtime."""


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        attributes: numbers, texts as bytes, or lists of these, by name.
        encoded: the attributes as they are in the file.
    """

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    encoded: tuple[bytes, ...]


@dataclass(frozen=True)
class Tensor:
    """A constant of an element type. Texts have dtype object."""

    element: str
    data: np.ndarray[Any, Any]


def read(model: bytes) -> tuple[list[Node], dict[str, Tensor]]:
    """The nodes of a model's graph in their order, and its constants by name.

    Raises:
        UnreadableError: the operators are of an unknown version, or a constant has an unknown form.
    """
    nodes, constants, graph = [], {}, b""
    for number, value in _fields(model):
        if number == 7:
            graph = value
        elif number == 8 and (opset := dict(_fields(value))) and opset[2] != _OPSETS.get(opset.get(1, b"")):
            raise UnreadableError(f"operators of version {opset[2]}")
    for number, value in _fields(graph):
        if number == 1:
            nodes.append(_node(value))
        elif number == 5:
            name, tensor = _tensor(value)
            constants[name] = tensor
    return nodes, constants


def single(node: Node, inputs: Sequence[tuple[str, tuple[int, ...]]], output: str, shape: tuple[int, ...]) -> bytes:
    """A model of a single node of ONNX's own, with inputs "0", "1", ... and output "y".

    Args:
        node: the node.
        inputs: element type and shape of each input.
        output: the element type of the output.
        shape: the shape of the output.
    """
    body = b"".join(_encoded(1, str(place)) for place in range(len(inputs)))
    body += _encoded(2, "y") + _encoded(4, node.operator)
    body += b"".join(_encoded(5, attribute) for attribute in node.encoded)
    graph = _encoded(1, body) + _encoded(2, "node")
    graph += b"".join(_encoded(11, _value_info(str(place), *tensor)) for place, tensor in enumerate(inputs))
    graph += _encoded(12, _value_info("y", output, shape))
    return _encoded(1, _IR_VERSION) + _encoded(7, graph) + _encoded(8, _encoded(2, _OPSETS[b""]))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer: integers, floats, and bytes for everything else."""
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
    inputs, outputs, operator, encoded = [], [], "", []
    for number, value in _fields(message):
        if number == 1:
            inputs.append(value.decode())
        elif number == 2:
            outputs.append(value.decode())
        elif number == 4:
            operator = value.decode()
        elif number == 5:
            encoded.append(value)
    return Node(operator, tuple(inputs), tuple(outputs), dict(map(_attribute, encoded)), tuple(encoded))


def _attribute(message: bytes) -> tuple[str, Any]:
    """The name and the value; None for kinds that no row function has."""
    name, scalar, items = "", None, []
    for number, value in _fields(message):
        if number == 1:
            name = value.decode()
        elif number in (2, 3, 4):
            scalar = value
        elif number in (8, 9):
            items.append(value)
    return name, scalar if scalar is not None else items or None


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


def _encoded(number: int, value: int | str | bytes) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, int):
        return _encoded_varint(number << 3) + _encoded_varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _encoded_varint(number << 3 | 2) + _encoded_varint(len(content)) + content


def _encoded_varint(value: int) -> bytes:
    head = bytearray()
    while value > 127:
        head.append(value & 127 | 128)
        value >>= 7
    return bytes([*head, value])


def _value_info(name: str, element: str, shape: tuple[int, ...]) -> bytes:
    """A ValueInfoProto."""
    dimensions = b"".join(_encoded(1, _encoded(1, size)) for size in shape)
    tensor = _encoded(1, _NUMBERS[element]) + _encoded(2, dimensions)
    return _encoded(1, name) + _encoded(2, _encoded(1, tensor))
