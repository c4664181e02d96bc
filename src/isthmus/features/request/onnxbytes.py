"""Reads ONNX graphs and writes graphs of one node, as bytes: a serving host has a runtime but no ONNX library."""

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ELEMENTS = {1: "float", 6: "int32", 7: "int64", 8: "string", 9: "bool", 11: "double"}
"""Element types by their number in TensorProto.DataType."""
NUMPY: dict[str, Any] = {
    "float": np.float32, "int32": np.int32, "int64": np.int64, "string": object, "bool": np.bool_, "double": np.float64,
}  # fmt: skip
_NUMBERS = {element: number for number, element in ELEMENTS.items()}
_IR_VERSION = 9
_OPSETS = {b"": 20, b"ai.onnx.ml": 2}
"""Supported operator versions by domain."""


class UnreadableGraph(Exception):
    """The ONNX graph has an unsupported feature or is damaged. The caller then falls back to ONNX Runtime."""


@dataclass(frozen=True)
class OnnxNode:
    """A node of an ONNX graph. `attributes` are numbers, bytes or lists; `encoded` has their bytes in the file."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    encoded: tuple[bytes, ...]


@dataclass(frozen=True)
class OnnxTensor:
    """A constant of an element type. Texts have dtype object."""

    element: str
    data: np.ndarray[Any, Any]


def read(model: bytes) -> tuple[list[OnnxNode], dict[str, OnnxTensor]]:
    try:
        fields = _fields(model)
        for opset in map(_fields, fields[8]):
            if opset[2] != [_OPSETS.get(b"".join(opset[1]))]:
                raise UnreadableGraph(f"operators of version {(opset[2] or [0])[-1]}")
        graph = _fields(b"".join(fields[7]))
        return [*map(_node, graph[1])], dict(map(_tensor, graph[5]))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise UnreadableGraph(f"damaged bytes ({error})") from error


def one_node_model(
    node: OnnxNode, inputs: Sequence[tuple[str, tuple[int, ...]]], output: str, shape: tuple[int, ...]
) -> bytes:
    body = b"".join(_encoded(1, str(place)) for place in range(len(inputs)))
    body += _encoded(2, "y") + _encoded(4, node.operator)
    body += b"".join(_encoded(5, attribute) for attribute in node.encoded)
    graph = _encoded(1, body) + _encoded(2, "node")
    graph += b"".join(_encoded(11, _value_info(str(place), *tensor)) for place, tensor in enumerate(inputs))
    graph += _encoded(12, _value_info("y", output, shape))
    return _encoded(1, _IR_VERSION) + _encoded(7, graph) + _encoded(8, _encoded(2, _OPSETS[b""]))


def _fields(message: bytes) -> defaultdict[int, list[Any]]:
    fields: defaultdict[int, list[Any]] = defaultdict(list)
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
            fields[key >> 3].append(value - (1 << 64) if value >> 63 else value)
        elif kind == 2:
            size, place = _varint(message, place)
            fields[key >> 3].append(message[place : place + size])
            place += size
        elif kind == 5:
            fields[key >> 3] += struct.unpack_from("<f", message, place)
            place += 4
        else:
            raise UnreadableGraph(f"a field of wire type {kind}")
    if place > len(message):
        raise UnreadableGraph("a truncated field")
    return fields


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _node(message: bytes) -> OnnxNode:
    fields = _fields(message)
    inputs, outputs = (tuple(name.decode() for name in fields[number]) for number in (1, 2))
    attributes = dict(map(_attribute, fields[5]))
    return OnnxNode(b"".join(fields[4]).decode(), inputs, outputs, attributes, tuple(fields[5]))


def _attribute(message: bytes) -> tuple[str, Any]:
    fields = _fields(message)
    scalar, items = fields[2] + fields[3] + fields[4], fields[8] + fields[9]
    return b"".join(fields[1]).decode(), scalar[-1] if scalar else items or None


def _tensor(message: bytes) -> tuple[str, OnnxTensor]:
    fields = _fields(message)
    name, element = b"".join(fields[8]).decode(), ELEMENTS.get(fields[2][-1], "") if fields[2] else ""
    if element == "string":
        data = np.array([*(text.decode() for text in fields[6]), None], object)[:-1]
    elif element and fields[9]:
        data = np.frombuffer(fields[9][-1], np.dtype(NUMPY[element]).newbyteorder("<"))
    else:
        raise UnreadableGraph(f"constant {name}")
    return name, OnnxTensor(element, data.reshape(fields[1]))


def _encoded(number: int, value: int | str | bytes) -> bytes:
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
    dimensions = b"".join(_encoded(1, _encoded(1, size)) for size in shape)
    tensor = _encoded(1, _NUMBERS[element]) + _encoded(2, dimensions)
    return _encoded(1, name) + _encoded(2, _encoded(1, tensor))
